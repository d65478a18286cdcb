"""The side panel's routes in a real ComfyUI: what they say of a run, and what they refuse."""

import urllib.error
import urllib.request

import pytest
from golden_graphs import TWO_RANKS, error_of, graph

STEPS = 6


@pytest.fixture
def ran(comfy):
    """A ComfyServer whose two ranks have just sampled; what it says of them."""
    assert error_of(comfy.run(graph())) < 1e-4
    return comfy.get("/parallel_dit/status")


def test_status_tells_each_ranks_steps(ran):
    (backend,) = ran["backends"]
    assert backend["what"] == "ulysses_degree 2" and backend["models"] == ["tiny-flux.safetensors"]
    assert backend["running"] == "" and backend["waiting"] == 0
    for rank in backend["ranks"]:
        assert rank["state"] == "ready" and rank["weight_bytes"] > 0 and rank["resident_bytes"] > 1 << 20
        times = [step for step in rank["steps"] if step[0] == rank["steps"][-1][0]]
        assert [step for _, step, *_ in times] == list(range(STEPS))
        begins = [begin for _, _, begin, *_ in times]
        assert begins == sorted(begins) and begins[-1] < 0
        for _, _, _, seconds, waited, sent in times:
            assert 0 < waited < seconds and sent > 0
    assert ran["last_run"]["steps"] == STEPS and ran["last_run"]["what"] == "ulysses_degree 2"
    assert ran["doing"] == ""


def test_the_last_error_stays(comfy, ran):
    """As the node says it, here one that only the ranks can find."""
    run = comfy.run(graph(change="nan"))
    found = comfy.get("/parallel_dit/status")["last_error"]
    assert run.status == "error" and found["text"] == run.message.strip() and not found["past"]
    assert comfy.run(graph(steps=1)).status == "success"
    found = comfy.get("/parallel_dit/status")["last_error"]
    assert found["text"] == run.message.strip() and found["past"]


def test_trials_are_graphs_up_to_the_sampler(comfy):
    prompt = graph(config={**TWO_RANKS, "warmup_steps": 2}, steps=10)
    status, found = comfy.post("/parallel_dit/trials", {"prompt": prompt})
    assert status == 200 and [found[name] for name in ("sampler", "loader", "config")] == ["4", "3", "2"]
    names = [trial["name"] for trial in found["trials"]]
    assert len(set(names)) == len(names) >= 4 and names[-1] == "one rank"
    assert [trial["ranks"] for trial in found["trials"]] == [2] * (len(names) - 1) + [1]
    assert {"cfg_degree 2", "ulysses_degree 2"} <= set(names)
    seeds = [prompt["4"]["inputs"]["seed"] for trial in found["trials"] for prompt in trial["prompts"]]
    assert len({42, *seeds}) == 1 + 2 * len(names), "which ComfyUI remembers no run of"
    for trial in found["trials"]:
        first, _ = trial["prompts"]
        assert "5" not in first, "nothing after the sampler"
        inputs = first["2"]["inputs"]
        assert inputs["warmup_steps"] == 2 and inputs["device"] == "cpu" and inputs["method"] == "manual"
        assert trial["inputs"].items() <= inputs.items()


@pytest.mark.parametrize(
    "config",
    [
        {**TWO_RANKS, "shares": "70,30"},
        {"gpus": "2", "device": "cpu", "shares": "70,30", "method": "fastest exact"},
    ],
    ids=["manual", "exact"],
)
def test_trials_have_the_shares_of_the_graph(comfy, config):
    """With every method that two ranks can share by; those of one rank alone cannot be."""
    status, found = comfy.post("/parallel_dit/trials", {"prompt": graph(config=config, steps=10)})
    assert status == 200
    *shared, alone = found["trials"]
    assert alone["name"] == "one rank" and alone["inputs"]["shares"] == ""
    assert len(shared) >= 3 and all("shares 70,30" in trial["name"] for trial in shared)
    assert not any(trial["inputs"]["shard_weights"] for trial in shared), "all fit without it"
    for trial in shared:
        assert trial["inputs"]["shares"] == trial["prompts"][0]["2"]["inputs"]["shares"] == "70,30"
    (staged,) = (trial["inputs"] for trial in shared if trial["inputs"]["pipefusion_degree"] == 2)
    assert (staged["num_pipeline_patch"] == 1) == ("method" in config), "one patch is exact"


def test_trials_of_a_graph_without_a_config_get_one(comfy):
    prompt = graph()
    del prompt["2"], prompt["3"]["inputs"]["config"]
    status, found = comfy.post("/parallel_dit/trials", {"prompt": prompt})
    assert status == 200 and found["config"] == ""
    (trial,) = found["trials"]  # the CPU has one rank unless somebody says more
    key, _ = trial["prompts"][0]["3"]["inputs"]["config"]
    assert trial["prompts"][0][key]["class_type"] == "ParallelConfig"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda prompt: prompt.pop("4"), "the graph has no Parallel Sampler on a Load Parallel DiT"),
        (lambda prompt: prompt["3"]["inputs"].update(model_name="gone"), "model_name is 'gone'"),
        (lambda prompt: prompt["2"]["inputs"].update(address="unix:/x"), "address is 'unix:/x'"),
        (lambda prompt: prompt["2"]["inputs"].update(cfg_degree=3), "cfg_degree is 3"),
        (lambda prompt: prompt["2"]["inputs"].update(shares="60,30,10"), "shares is '60,30,10', 3 numbers"),
        (lambda prompt: prompt["2"]["inputs"].update(shares=["1", 0]), "shares of Parallel Config is linked"),
    ],
)
def test_what_cannot_be_tried_is_one_sentence(comfy, change, sentence):
    prompt = graph()
    change(prompt)
    status, found = comfy.post("/parallel_dit/trials", {"prompt": prompt})
    assert status == 400 and sentence in found["error"]


def test_another_page_is_refused(comfy, ran):
    for headers in ({"Sec-Fetch-Site": "same-site"}, {"Origin": "https://elsewhere.example"}):
        url = f"http://127.0.0.1:{comfy.port}/parallel_dit/stop"
        request = urllib.request.Request(url, b"{}", headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 403
    assert len(comfy.get("/parallel_dit/status")["backends"]) == 1


def test_log_and_free(comfy, ran):
    assert b"blocks" in comfy.fetch("/parallel_dit/log")
    status, found = comfy.post("/parallel_dit/free", {})
    assert status == 200 and found["freed"] >= 1
    assert comfy.get("/parallel_dit/status")["backends"][0]["models"] == []
    assert comfy.post("/parallel_dit/free", {}) == (200, {"freed": 0})
    assert error_of(comfy.run(graph())) < 1e-4
