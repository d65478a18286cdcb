"""Graphs in a real ComfyUI: parity, progress, cancel, and what is not done again."""

import json
import re
import time

import pytest
from golden_graphs import TWO_RANKS, custom_graph, error_of, graph, model_graph, ranks_of
from parallel_dit.backend.client.connected import LEFT, WAITS
from parallel_dit.backend.client.step_timer import BEGINS
from safetensors.torch import load_file
from versions import skip_without_nodes, skip_without_noise_of_its_own


@pytest.mark.parametrize(
    "case, sampler",
    [
        ("euler_simple", {}),
        ("denoise06", {"denoise": 0.6}),
        ("inpaint", {}),
        ("batch2", {}),
        ("size20x12", {}),
        ("dpmpp_2m_beta", {"sampler_name": "dpmpp_2m", "scheduler": "beta", "cfg": 3.5}),
        ("ddim_ddim_uniform", {"sampler_name": "ddim", "scheduler": "ddim_uniform", "cfg": 1.0}),
    ],
)
def test_same_latent_as_ksampler(comfy, case, sampler):
    run = comfy.run(graph(case, **sampler))
    assert error_of(run) < 1e-4
    assert run.steps[-1][0] == run.steps[-1][1] and run.previews > 0


@pytest.mark.parametrize(
    "case, config",
    [
        ("euler_simple", {"ring_degree": 2}),
        ("batch2", {"data_parallel_degree": 2}),
        ("euler_simple", {"ulysses_degree": 2, "shard_weights": True}),
        ("euler_simple", {"cfg_degree": 2, "offload_modulation": True}),
        ("euler_simple", {"tensor_parallel_degree": 2}),
        ("euler_simple", {"tensor_parallel_degree": 2, "split_scheme": "row"}),
        ("euler_simple", {"pipefusion_degree": 2, "num_pipeline_patch": 1, "attn_layer_num_for_pp": "5,7"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_every_way_to_use_ranks_from_the_graph(comfy, case, config):
    assert error_of(comfy.run(graph(case, config={"device": "cpu", **config}))) < 1e-4


def test_custom_sampler(comfy):
    """Another's noise and noise levels; both outputs are the golden latent, since the schedule ends at 0."""
    prompt = graph()
    file = prompt["5"]["inputs"]["file"]
    prompt["6"] = {"class_type": "RandomNoise", "inputs": {"noise_seed": 42}}
    prompt["7"] = {
        "class_type": "ManualSigmas",
        "inputs": {"sigmas": ", ".join(f"{sigma:.9f}" for sigma in load_file(file)["sigmas"].tolist())},
    }
    prompt["4"] = {
        "class_type": "ParallelSamplerCustom",
        "inputs": {
            "dit": ["3", 0],
            "noise": ["6", 0],
            "cfg": 3.0,
            "sampler_name": "euler",
            "sigmas": ["7", 0],
            "positive": ["1", 0],
            "negative": ["1", 1],
            "latent_image": ["1", 2],
        },
    }
    prompt["8"] = {"class_type": "TestGoldenError", "inputs": {"samples": ["4", 1], "file": file}}
    skip_without_nodes(prompt, comfy.get("/object_info"))
    run = comfy.run(prompt)
    assert error_of(run) < 1e-4 and json.loads(run.outputs["8"]["text"][0])["error"] < 1e-4
    assert run.steps == [(step, 6) for step in range(1, 7)]


@pytest.mark.parametrize(
    "case, sampler",
    [
        ("euler_simple", {}),
        ("inpaint", {}),
        ("batch2", {}),
        ("size20x12", {}),
        ("dpmpp_2m_beta", {"sampler_name": "dpmpp_2m", "scheduler": "beta", "cfg": 3.5}),
        ("heun_simple", {"sampler_name": "heun", "cfg": 3.5}),
        ("uni_pc_simple", {"sampler_name": "uni_pc", "cfg": 2.0}),
        ("dpmpp_sde_simple", {"sampler_name": "dpmpp_sde", "cfg": 2.0}),
        ("euler_ancestral_simple", {"sampler_name": "euler_ancestral", "cfg": 1.0}),
    ],
)
def test_same_latent_from_comfyuis_ksampler(comfy, case, sampler):
    if sampler.get("sampler_name") == "euler_ancestral":
        skip_without_noise_of_its_own()
    run = comfy.run(model_graph(case, **sampler))
    assert error_of(run) < 1e-4
    assert run.previews > 0


def test_the_loader_describes_a_call_of_parallel_model(comfy):
    """Which has one patch, whatever is set for samplers on the ranks."""
    staged = {"pipefusion_degree": 2, "num_pipeline_patch": 3, "device": "cpu"}
    run = comfy.run(model_graph(config=staged))
    assert error_of(run) < 1e-4
    line = run.outputs["3"]["parallel_dit"][0].splitlines()[-1]
    assert re.match(r".* \(assumed\), 6 steps of a call each, cfg 3\.0: about ", line)
    assert line.endswith(" · 1 patch")


def test_same_latent_from_sampler_custom_advanced(comfy, ranks):
    assert error_of(comfy.run(custom_graph("dpmpp_2m", "beta", 3.5, "dpmpp_2m_beta"))) < 1e-4
    assert ranks_of(comfy) == ranks


def test_interrupt_of_comfyuis_ksampler_keeps_the_ranks(comfy, ranks):
    pressed = []

    def press(step):
        if step >= 5 and not pressed:
            pressed.append(step)
            comfy.post("/interrupt", {})

    run = comfy.run(model_graph(steps=500, seed=5), press)
    assert run.status == "interrupted" and run.steps[-1][0] < 100
    comfy.post("/free", {"unload_models": True})
    assert error_of(comfy.run(model_graph("size20x12"))) < 1e-4
    assert ranks_of(comfy) == ranks


def test_denoise_zero_returns_the_latent(comfy):
    run = comfy.run(graph("denoise06", denoise=0.0))
    assert run.status == "success" and not run.steps


def test_backend_is_reused(comfy, ranks):
    changed = {**TWO_RANKS, "attention": "sdpa", "warmup_steps": 2}  # these travel with each request
    again = comfy.run(graph(config=changed, seed=2))
    assert again.status == "success" and not again.loaded
    assert len(ranks) == 2 and ranks_of(comfy) == ranks


def test_other_degrees_load_again_and_say_why(comfy, ranks):
    before = len(comfy.log.read_text(errors="replace"))
    run = comfy.run(graph(config={"pipefusion_degree": 2, "num_pipeline_patch": 1, "device": "cpu"}))
    assert error_of(run) < 1e-4 and run.loaded[-1][0] == run.loaded[-1][1] > 0
    log = comfy.log.read_text(errors="replace")[before:]
    assert "the ranks for" in log and "rank 1: stage 1" in log
    piped = {"pipefusion_degree": 2, "num_pipeline_patch": 5, "device": "cpu"}
    again = comfy.run(graph(config=piped, cfg=1.0))
    assert again.status == "success" and not again.loaded
    told = [next(text for text in each.texts if "rank 0 · " in text) for each in (run, again)]
    plans = []
    for each, text in zip((run, again), told):
        first, second, kernel, plan = text.splitlines()
        plans.append(plan)
        assert re.fullmatch(r"rank 1 · [\d.]+ MB · blocks \d+-\d+", second) and first.startswith("rank 0")
        size = r"(1024 x 1024|latent 128 x 128) \(assumed\)"  # the golden latent's node tells none
        assert re.match(rf"{size}, \d steps, cfg \d\.\d: about [\d.]+ MB more · sends", plan)
        assert kernel.startswith("attention auto: ")
        assert each.outputs["3"]["parallel_dit"] == [text]  # which the page keeps
    assert "cfg 3.0: " in plans[0] and plans[0].endswith(" · 1 patch")
    assert "cfg 1.0: " in plans[1] and plans[1].endswith(" · 5 patches (reuse)")


def test_gguf_files_are_listed(comfy):
    (comfy.folder / "models/diffusion_models/some").mkdir(exist_ok=True)
    (comfy.folder / "models/diffusion_models/some/model-Q4_K.gguf").write_bytes(b"GGUF")
    options = comfy.get("/object_info/LoadParallelDiT")["LoadParallelDiT"]["input"]["required"]["model_name"]
    assert "some/model-Q4_K.gguf" in str(options)
    run = comfy.run(graph(model="some/model-Q4_K.gguf"))
    assert run.status in ("error", "rejected")  # rejected where no ranks run that say it
    assert "model-Q4_K.gguf" in run.message and "\n" not in run.message.strip()


def test_interrupt_half_way_and_again(comfy, ranks):
    pressed = []

    def press(step):
        if step >= 5 and not pressed:
            pressed.append(step)
            comfy.post("/interrupt", {})

    run = comfy.run(graph(steps=500, seed=3), press)
    assert run.status == "interrupted" and run.steps[-1][0] < 100
    assert run.texts[-2:] == ["cancelling: the ranks end the call of the model in progress", "cancelled"]
    assert error_of(comfy.run(graph("size20x12"))) < 1e-4
    assert ranks_of(comfy) == ranks


def test_cancel_in_a_slow_first_step_frees_the_queue(comfy, ranks):
    """A large latent is as slow as blocks that compile. The next run waits for the step, says so, and can be
    cancelled at once; the ranks stay."""

    def press_at(line):
        pressed = []

        def press(text):
            if line in text and not pressed:
                pressed.append(text)
                comfy.post("/interrupt", {})

        return press

    slow = graph(steps=2)
    size = {"width": 1792, "height": 1792, "batch_size": 1}
    slow["6"] = {"class_type": "EmptySD3LatentImage", "inputs": size}
    slow["4"]["inputs"]["latent_image"] = ["6", 0]
    run = comfy.run(slow, at_text=press_at(BEGINS))
    assert run.status == "interrupted" and not run.steps and run.texts[-1].startswith(f"{LEFT}; {BEGINS}")
    run = comfy.run(graph(), at_text=press_at(WAITS))
    assert run.status == "interrupted" and run.texts[-1] == "cancelled"
    run = comfy.run(graph())
    assert error_of(run) < 1e-4 and any(text.startswith(WAITS) for text in run.texts)
    assert ranks_of(comfy) == ranks


def test_what_one_sees(comfy, ranks):
    """The terminal's bar, and a line under the node with the steps and the time that is left."""
    before = len(comfy.log.read_text(errors="replace"))
    run = comfy.run(graph(steps=60, seed=5))
    assert run.status == "success" and run.steps == [(step, 60) for step in range(1, 61)]
    line = r"60 steps in [\d.]+ s · [\d.]+ (steps/s|s/step) · 2 ranks"
    gain = r" · [\d.]+x one rank| · about [\d.]+x one rank \(projected\)"  # or none, before any measurement
    slower = r"\nSlower than one rank here: .*"  # a tiny model is
    assert re.fullmatch(f"{line}(({gain})({slower})?)?", run.texts[-1]), run.texts
    assert run.outputs["4"]["parallel_dit"] == [run.texts[-1]]
    assert re.fullmatch(r"step \d+/60, \d\d:\d\d left \([\d.]+ (steps/s|s/step)\)", run.texts[0]), run.texts
    assert "60/60 [" in comfy.log.read_text(errors="replace")[before:]


def test_unchanged_inputs_do_not_run_again_and_a_changed_seed_does(comfy):
    nodes = graph(seed=101)
    sampler = {**nodes["4"], "inputs": {**nodes["4"]["inputs"], "seed": 102}}
    first, same, other = (comfy.run(each) for each in (nodes, nodes, {**nodes, "4": sampler}))
    assert first.steps and not same.steps and other.steps == first.steps
    assert {"3", "4"} <= set(same.cached) and "3" in other.cached and "4" not in other.cached
    assert error_of(first) == error_of(same) != error_of(other)


def history_of(comfy, prompt_id: str) -> dict[str, float]:
    """What happened when (seconds since 1970) to a queued graph that has ended."""
    deadline = time.monotonic() + 60
    while prompt_id not in (history := comfy.get(f"/history/{prompt_id}")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return {name: told["timestamp"] / 1000 for name, told in history[prompt_id]["status"]["messages"]}


def test_interrupt_takes_a_step_and_the_next_in_the_queue_starts_at_once(comfy, ranks):
    behind, pressed, moments = [], [], []

    def press(step):
        moments.append(time.time())
        if step == 1:
            behind.append(comfy.post("/prompt", {"prompt": graph("size20x12", seed=42)})[1]["prompt_id"])
        if step == 20:
            pressed.append(time.time())
            comfy.post("/interrupt", {})

    run = comfy.run(graph(steps=2000, seed=7), press)
    assert run.status == "interrupted"
    steps = [later - earlier for earlier, later in zip(moments[1:20], moments[2:20])]
    step, left = (
        max(steps),
        1980 * sum(steps) / len(steps),
    )  # seconds of one, and of those that the interrupt leaves out
    stopped, after = list(comfy.get("/history").values()), history_of(comfy, behind[0])
    interrupted = max(
        message["timestamp"] / 1000
        for told in stopped
        for name, message in told["status"]["messages"]
        if name == "execution_interrupted"
    )
    assert interrupted - pressed[0] < 3 * step + left / 50
    assert after["execution_start"] - interrupted < left / 50 and "execution_success" in after


def test_unload_models_button(comfy):
    assert error_of(comfy.run(graph("euler_simple", seed=42))) < 1e-4
    comfy.post("/free", {"unload_models": True})
    assert error_of(comfy.run(graph("batch2"))) < 1e-4
