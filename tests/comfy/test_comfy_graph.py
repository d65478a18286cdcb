"""Graphs in a real ComfyUI: parity, progress, cancel, what is refused, and what happens when processes
die."""

import json
import os
import re
import signal
import time
from itertools import count

import pytest
import tiny
from safetensors.torch import load_file

TWO_RANKS = {"ulysses_degree": 2, "device": "cpu"}
#: Seconds, also where other processes want the machine; what waits for ranks that are dead waits for minutes.
SOON = 60
#: Tells graphs apart that are otherwise equal, so that no test finds its latent in ComfyUI's cache.
RUNS = count(1)


def graph(
    case="euler_simple", config=TWO_RANKS, change="nothing", model="tiny-flux.safetensors", **sampler
) -> dict:
    """An API graph that samples a golden case and compares; no two are equal."""
    file = str(tiny.GOLDEN / f"flux-dev__{case}.safetensors")
    inputs = {
        "seed": 42,
        "steps": 6,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
        **sampler,
    }
    return {
        "1": {
            "class_type": "TestGoldenInputs",
            "inputs": {"file": file, "change": change, "run": next(RUNS)},
        },
        "2": {"class_type": "ParallelConfig", "inputs": config},
        "3": {"class_type": "LoadParallelDiT", "inputs": {"config": ["2", 0], "model_name": model}},
        "4": {
            "class_type": "ParallelSampler",
            "inputs": {
                "dit": ["3", 0],
                "positive": ["1", 0],
                "negative": ["1", 1],
                "latent_image": ["1", 2],
                **inputs,
            },
        },
        "5": {"class_type": "TestGoldenError", "inputs": {"samples": ["4", 0], "file": file}},
    }


def model_graph(case="euler_simple", **arguments) -> dict:
    """The same graph with ComfyUI's KSampler on the MODEL of ParallelModel."""
    nodes = graph(case, **arguments)
    inputs = {key: value for key, value in nodes["4"]["inputs"].items() if key != "dit"}
    return {
        **nodes,
        "4": {"class_type": "KSampler", "inputs": {"model": ["6", 0], **inputs}},
        "6": {"class_type": "ParallelModel", "inputs": {"dit": ["3", 0]}},
    }


def custom_graph(sampler: str, scheduler: str, cfg: float, case: str) -> dict:
    """SamplerCustomAdvanced on the MODEL of ParallelModel, with a ModelSamplingFlux that asks for what Flux
    has anyway."""
    nodes, model = model_graph(case), ["7", 0]
    return {
        **{key: nodes[key] for key in "1236"},
        "7": {
            "class_type": "ModelSamplingFlux",
            "inputs": {
                "model": ["6", 0],
                "max_shift": 1.15,
                "base_shift": 0.5,
                "width": 1024,
                "height": 1024,
            },
        },
        "8": {
            "class_type": "CFGGuider",
            "inputs": {"model": model, "positive": ["1", 0], "negative": ["1", 1], "cfg": cfg},
        },
        "9": {
            "class_type": "BasicScheduler",
            "inputs": {"model": model, "scheduler": scheduler, "steps": 6, "denoise": 1.0},
        },
        "10": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler}},
        "11": {"class_type": "RandomNoise", "inputs": {"noise_seed": 42}},
        "4": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {
                "noise": ["11", 0],
                "guider": ["8", 0],
                "sampler": ["10", 0],
                "sigmas": ["9", 0],
                "latent_image": ["1", 2],
            },
        },
        "5": nodes["5"],
    }


def error_of(run) -> float:
    assert run.status == "success", run.message or run.node_errors
    return json.loads(run.outputs["5"]["text"][0])["error"]


def ranks_of(server) -> dict[int, str]:
    """Process id of every rank of the server's backend."""
    return {
        pid: line
        for pid, line in server.descendants("backend.worker").items()
        if "torch.distributed.run" not in line
    }


@pytest.fixture
def ranks(comfy) -> dict[int, str]:
    """The ranks of TWO_RANKS with the tiny Flux, running whatever an earlier test left."""
    error_of(comfy.run(graph()))
    return ranks_of(comfy)


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
    run = comfy.run(model_graph(case, **sampler))
    assert error_of(run) < 1e-4
    assert run.previews > 0


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
    for each, text in zip((run, again), told):
        first, second, plan = text.splitlines()
        assert re.fullmatch(r"rank 1 · [\d.]+ MB · blocks \d+–\d+", second) and first.startswith("rank 0")
        assert re.match(r"(1024 x 1024|latent 128 x 128)(, two prompts)?: about [\d.]+ MB more · sends", plan)
        assert each.outputs["3"]["parallel_dit"] == [text]  # which the page keeps
    assert "two prompts" in told[0] and told[0].endswith(" · 1 patch")
    assert "two prompts" not in told[1] and told[1].endswith(" · 5 patches (reuse)")


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


def test_what_one_sees(comfy, ranks):
    """The terminal's bar, and a line under the node with the steps and the time that is left."""
    before = len(comfy.log.read_text(errors="replace"))
    run = comfy.run(graph(steps=60, seed=5))
    assert run.status == "success" and run.steps == [(step, 60) for step in range(1, 61)]
    line = r"60 steps in [\d.]+ s · [\d.]+ (steps/s|s/step) · 2 ranks( · [\d.]+x one rank)?"
    assert re.fullmatch(line, run.texts[-1]), run.texts
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


@pytest.mark.parametrize(
    "expected, arguments",
    [
        ("latent_image has the shape", {"change": "channels"}),
        ("NaN|not finite|finite", {"change": "nan"}),
        ("'area'", {"change": "area"}),
        ("'control'", {"change": "control"}),
        ("skips the negative prompt", {"cfg": 1.0, "config": {"cfg_degree": 2, "device": "cpu"}}),
        ("two branches", {"config": {"cfg_degree": 3, "device": "cpu"}}),
        ("at most 16", {"config": {"ulysses_degree": 32, "device": "cpu"}}),
        ("no CUDA GPU|this machine has", {"config": {"ulysses_degree": 64, "device": "cuda"}}),
        (
            "num_pipeline_patch",
            {"config": {"pipefusion_degree": 2, "num_pipeline_patch": 1000, "device": "cpu"}},
        ),
        ("not a list of device numbers", {"config": {"gpus": "a,b"}}),
        ("PARALLEL_DIT_ADDRESSES does not list", {"config": {"address": "tcp:127.0.0.1:1"}}),
        ("PARALLEL_DIT_ADDRESSES does not list", {"config": {"address": "somewhere"}}),
    ],
)
def test_bad_input_is_one_sentence_and_the_next_queue_works(comfy, expected, arguments):
    before = len(comfy.log.read_text(errors="replace"))
    run = comfy.run(graph(**arguments))
    known = "config" in arguments and not {"address", "num_pipeline_patch"} & arguments["config"].keys()
    assert run.status == ("rejected" if known else "error")
    message = run.message.strip()
    assert re.search(expected, message) and "\n" not in message, message
    if known:
        kind = "ParallelSampler" if "cfg" in arguments else "ParallelConfig"
        assert [node["class_type"] for node in run.node_errors.values()] == [kind]
    else:
        assert message in run.texts
    assert "Traceback" not in comfy.log.read_text(errors="replace")[before:]
    assert error_of(comfy.run(graph("euler_simple"))) < 1e-4


@pytest.mark.parametrize(
    "degrees, words",
    [({"pipefusion_degree": 13}, "has 12 blocks"), ({"tensor_parallel_degree": 3}, "attention heads")],
)
def test_degrees_that_do_not_fit_the_model_are_refused_before_ranks_end(comfy, ranks, degrees, words):
    """Only the model's headers tell, and the ranks that run stay for the next graph."""
    run = comfy.run(graph(config={**degrees, "device": "cpu"}))
    assert run.status == "rejected" and words in run.message
    assert [node["class_type"] for node in run.node_errors.values()] == ["LoadParallelDiT"]
    assert ranks_of(comfy) == ranks


def test_cfg_degree_without_guidance_is_refused_before_anything_is_launched(comfy, ranks):
    run = comfy.run(graph(cfg=1.0, config={"cfg_degree": 2, "ulysses_degree": 2, "device": "cpu"}))
    assert run.status == "rejected" and "skips the negative prompt" in run.message
    assert ranks_of(comfy) == ranks  # the four ranks would have taken their place


@pytest.mark.parametrize(
    "name, content",
    [
        ("truncated.safetensors", "half"),
        ("text.safetensors", b"not a checkpoint"),
        ("other.safetensors", "other"),
    ],
)
def test_bad_files(comfy, name, content):
    models = comfy.folder / "models/diffusion_models"
    whole = (models / "tiny-flux.safetensors").read_bytes()
    if content == "half":
        content = whole[: len(whole) // 2]
    elif content == "other":
        from safetensors.torch import save
        from torch import zeros

        content = save({"some.other.weight": zeros(4, 4)})
    (models / name).write_bytes(content)
    run = comfy.run(graph(model=name))
    assert run.status in ("error", "rejected"), run.status  # rejected where no ranks run that say it
    assert name in run.message and "\n" not in run.message.strip(), run.message
    assert error_of(comfy.run(graph("euler_simple"))) < 1e-4


def test_steps_zero_and_a_missing_file_are_rejected_at_once(comfy):
    for arguments in ({"steps": 0}, {"model": "nowhere.safetensors"}):
        run = comfy.run(graph(**arguments))
        assert run.status == "rejected" and run.node_errors


def test_unload_models_button(comfy):
    assert error_of(comfy.run(graph("euler_simple", seed=42))) < 1e-4
    comfy.post("/free", {"unload_models": True})
    assert error_of(comfy.run(graph("batch2"))) < 1e-4


def test_killed_rank_is_named_and_the_next_queue_works(comfy, ranks):
    killed = {}

    def kill_rank_1(step):
        if step >= 3 and not killed:
            rank_1 = max(ranks)
            rank = [
                part
                for part in open(f"/proc/{rank_1}/environ").read().split("\0")
                if part.startswith("RANK=")
            ][0][5:]
            os.kill(rank_1, signal.SIGKILL)
            killed.update(rank=rank, at=time.monotonic())

    run = comfy.run(graph(steps=500, seed=4), kill_rank_1)
    assert run.status == "error" and time.monotonic() - killed["at"] < SOON
    assert (
        f"rank {killed['rank']} was killed by SIGKILL" in run.message and "\n" not in run.message.strip()
    ), run.message
    assert error_of(comfy.run(graph("size20x12"))) < 1e-4


def test_rank_killed_while_idle_is_named_under_the_node_and_in_the_log(comfy, ranks):
    os.kill(max(ranks), signal.SIGKILL)
    deadline = time.monotonic() + SOON
    while comfy.descendants("backend.worker"):  # their launcher too, which says why they ended
        assert time.monotonic() < deadline
        time.sleep(0.1)
    run = comfy.run(graph("size20x12"))
    assert error_of(run) < 1e-4
    cause = next(line for text in run.texts for line in text.split("\n") if "was killed by SIGKILL" in line)
    assert cause in comfy.log.read_text(errors="replace")
    assert os.path.exists(re.search(r"its log is (\S+)\.$", cause)[1])
    assert any(text.startswith(f"{cause}\nstarting 2 ranks, ") for text in run.texts)
    assert any(re.search(r"\nreading [\d.]+ of [\d.]+ MB$", text) for text in run.texts)


def test_nothing_is_left_when_comfyui_is_killed(start_comfy):
    server = start_comfy()
    error_of(server.run(graph("euler_simple")))
    ours = server.descendants()
    assert len(ranks_of(server)) == 2
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + SOON
    while left := [pid for pid in ours if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, [ours[pid] for pid in left]
        time.sleep(0.1)


class Seen(Exception):
    """Ends following a graph."""


def test_ctrl_c_while_sampling_is_no_failure_of_the_backend(start_comfy):
    server = start_comfy()

    def press(step):
        if step == 3:
            server.process.send_signal(signal.SIGINT)
            raise Seen

    with pytest.raises(Seen):
        server.run(graph(steps=2000, seed=9), press)
    server.process.wait(SOON)
    log = server.log.read_text(errors="replace")
    assert "Stopped server" in log and "The backend ended" not in log and "BackendError" not in log, log[
        -3000:
    ]
    backend_log = re.search(r"log (/\S+/backend\.log)", log)[1]
    assert not os.path.exists(os.path.dirname(backend_log))
