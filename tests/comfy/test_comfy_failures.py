"""Graphs in a real ComfyUI: what is refused, and what happens when processes die."""

import os
import re
import signal
import time

import pytest
from golden_graphs import error_of, graph, ranks_of

#: Seconds, also where other processes want the machine; what waits for ranks that are dead waits for minutes.
SOON = 60


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
        assert comfy.get("/parallel_dit/status")["last_error"]["text"] == message
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
    # a shell's background jobs begin with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
