"""Several machines: which methods cross their network, what is refused, and docs/multi_node.md's examples."""

import re
import shutil
import subprocess
from itertools import combinations, product
from pathlib import Path

import diffusers
import interpreters
import pytest
import yaml
from page_examples import DOCS, examples

from backend.cli import start
from backend.cli.settings import read_config
from backend.client.launching import dependencies
from backend.client.launching.agent_command import agent_command
from backend.client.machines.machines import Machines, crossing, placement
from backend.config import AXES, ConfigError, ParallelConfig
from backend.parallel import mesh

EXAMPLES = examples("multi_node.md")
PAGE = (DOCS / "multi_node.md").read_text()
TWO = Machines(2, 1, "10.0.0.1:29500", "lo")


@pytest.mark.parametrize("machines", [1, 2, 4, 8])
def test_axes_that_cross_are_those_whose_groups_do(machines):
    """Against the groups themselves, of every layout of 16 ranks."""
    for sizes in product([1, 2, 4], repeat=6):
        config = ParallelConfig(**dict(zip(AXES.values(), sizes)))
        if config.world_size % machines or config.world_size > 16:
            continue
        here = config.world_size // machines
        for axis, crosses in crossing(config.degrees, machines).items():
            spans = [{rank // here for rank in group} for group in groups(config, axis)]
            assert crosses == any(len(span) > 1 for span in spans), (sizes, axis)


def groups(config: ParallelConfig, axis: str) -> list[list[int]]:
    """The groups of an axis, counted out: ranks whose places on all other axes are the same."""
    names = list(config.degrees)
    found: dict[tuple, list[int]] = {}
    for rank, place in enumerate(product(*map(range, config.degrees.values()))):
        others = tuple(each for name, each in zip(names, place) if name != axis)
        found.setdefault(others, []).append(rank)
    return list(found.values())


def test_what_speaks_in_every_block_stays_inside():
    degrees = ParallelConfig(ulysses_degree=4, tensor_parallel_degree=2, cfg_degree=2).degrees
    assert crossing(degrees, 2) == {"tp": False, "ulysses": False, "cfg": True}
    assert "inside a machine tensor_parallel_degree 2, ulysses_degree 4; across machines cfg_degree 2" in (
        placement(degrees, 2)
    )


@pytest.mark.parametrize("inner, outer", list(combinations(reversed(AXES), 2)))
def test_the_slower_axis_of_two_crosses(inner, outer):
    """Two machines of two ranks: tp, Ulysses, ring, PipeFusion, CFG, data from the inside, by the groups that
    the mesh makes."""
    config = ParallelConfig(**{AXES[inner]: 2, AXES[outer]: 2})
    ranks = mesh.layout(config)
    for axis, crosses in ((inner, False), (outer, True)):
        members = ranks.movedim(list(AXES).index(axis), -1).reshape(-1, 2) // 2
        assert [len(set(machines)) > 1 for machines in members.tolist()] == [crosses, crosses]
    text = placement(config.degrees, 2)
    assert f"inside a machine {AXES[inner]} 2; across machines {AXES[outer]} 2." in text
    assert "Every block waits" not in text or outer == "ulysses"


def test_the_report_warns_where_every_block_waits():
    text = placement(ParallelConfig(ulysses_degree=4).degrees, 2)
    assert "Every block waits for the network, by ulysses_degree" in text
    assert "shard_weights" in placement(ParallelConfig(ring_degree=2).degrees, 2, shard_weights=True)


@pytest.mark.parametrize(
    "machines, says",
    [
        (Machines(2, 2), "number the machines from 0 to 1"),
        (Machines(0, 0), "number the machines"),
        (Machines(2, 0), "needs --rdzv-endpoint HOST:PORT"),
        (Machines(2, 0, "10.0.0.1"), "needs --rdzv-endpoint HOST:PORT"),
        (Machines(2, 0, "10.0.0.1:65535"), "two free ports"),
        (Machines(2, 0, "10.0.0.1:29500"), "needs --interface"),
        (Machines(2, 0, "10.0.0.1:29500", "no-such-net"), "has no IPv4 address here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_missing_is_said(machines, says):
    with pytest.raises(ConfigError, match=says):
        machines.validate()


def test_a_machine_whose_interface_has_lost_its_address_has_a_name(monkeypatch):
    """Else the cause of its failure, a cable that was pulled, would be another error."""
    assert TWO.name == "machine 1 (127.0.0.1)"
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": []})
    assert TWO.name == "machine 1"
    assert Machines().name == ""
    with pytest.raises(ConfigError, match="has no IPv4 address here"):
        TWO.validate()


@pytest.mark.parametrize(
    "config, says",
    [
        (ParallelConfig(ulysses_degree=3), "cannot share evenly"),
        (ParallelConfig(ulysses_degree=2, gpus="0,1"), "CUDA_VISIBLE_DEVICES on each"),
    ],
    ids=["uneven", "gpus"],
)
def test_configurations_that_machines_cannot_share(config, says):
    with pytest.raises(ConfigError, match=says):
        TWO.ranks_here(config)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--node-rank", "1", "--config", "{}  "], "belong to machine 0"),
        (["--node-rank", "1", "--address", "unix:/s"], "belong to machine 0"),
        (["--node-rank", "0"], "needs --address"),
    ],
    ids=["configuration", "address", "no address"],
)
def test_what_only_machine_0_is_given(arguments, says, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", "3" * 64)
    where = ["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:29500", "--interface", "lo"]
    with pytest.raises(ConfigError, match=says):
        start.main([*where, *arguments])


def test_libraries_that_divide_a_step_are_the_same_everywhere(monkeypatch):
    """Another diffusers has other blocks, another yunchang other rings: a rank would wait for ever."""
    found = start.same_everywhere()
    assert {"pack", "torch", "python", "diffusers", "yunchang"} <= found.keys()
    assert found["diffusers"] == diffusers.__version__
    monkeypatch.setattr(dependencies, "installed", lambda name: f"{name} 0.1")
    assert start.same_everywhere() != found


def test_the_compared_versions_are_those_of_the_ranks_python(monkeypatch, tmp_path):
    """PARALLEL_DIT_PYTHON may have another diffusers than the launcher."""
    own = start.same_everywhere()
    python = interpreters.recording(tmp_path / "python", tmp_path / "log")
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", str(python))
    monkeypatch.setattr(dependencies, "installed", lambda name: f"{name} 0.1")
    assert start.same_everywhere() == own
    assert "backend.client.launching.dependencies" in (tmp_path / "log").read_text()


def test_several_machines_meet_where_nothing_is_unpickled():
    """torchrun's c10d rendezvous unpickles what lies in its store; it is for the private file alone."""
    command = agent_command(2, Path("/x"), TWO)
    assert command[command.index("--rdzv-backend") + 1] == "static"
    assert command[command.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    one = agent_command(2, Path("/x"))
    assert one[one.index("--rdzv-endpoint") + 1] == "/x/rdzv" and "store_type=file,keep" in " ".join(one)


# ---------------------------------------------------------------------- the page's examples
def started(text: str) -> list[str]:
    """The options of an example's start command, and those that it adds on machine 0."""
    added, _, command = text.replace("\\\n", " ").partition("serve.py start")
    words = [*command.partition("\n")[0].split(), *added.partition("head=(-")[2].split()]
    return [word for word in words if word.startswith("--")]


def test_the_options_of_the_examples_exist():
    known = {"--nnodes", "--node-rank", "--rdzv-endpoint", "--interface", "--token-file", "--models"}
    known |= {"--address", "--config"}
    for name, text in EXAMPLES.items():
        used = {word.strip("()'\"") for word in started(text)}
        assert known - {"--address", "--config"} <= used <= known, name


def test_the_configurations_of_the_page_run_at_cfg_1():
    """As distilled models are sampled, and models with a Lightning LoRA: cfg_degree 2 is refused there."""
    texts = re.findall(r"--config ['\"](\{.*?\})['\"]", PAGE.replace('\\"', '"'))
    assert len(texts) == 3
    for text in texts:
        read_config(text).check_guidance(1.0, negative=False)


def test_the_page_names_what_has_to_be_the_same_everywhere():
    _, _, named = PAGE.partition("is refused in one sentence before any rank starts")
    named = named.partition("\n\n")[0]
    assert all(each in named.lower() for each in start.same_everywhere())


def test_the_page_makes_the_python_that_its_examples_run():
    text = EXAMPLES["systemd"] + EXAMPLES["slurm"]
    assert ".venv/bin/python" in text and PAGE.count("-m venv .venv") == 2


def test_slurm_example_is_bash():
    for text in (EXAMPLES["slurm"], EXAMPLES["slurm"].split("bash -c '")[1].rpartition("'")[0]):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_kubernetes_example_is_yaml_and_its_script_is_bash():
    service, policy, job = yaml.safe_load_all(EXAMPLES["kubernetes"])
    assert [each["kind"] for each in (service, policy, job)] == ["Service", "NetworkPolicy", "Job"]
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    container = pod["containers"][0]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=True)


def test_systemd_example_is_a_unit(tmp_path):
    unit = EXAMPLES["systemd"]
    assert [line for line in unit.splitlines() if line.startswith("[")] == [
        "[Unit]",
        "[Service]",
        "[Install]",
    ]
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    path = tmp_path / "pdit.service"
    # the folders of the example are not here: those of this machine take their place
    path.write_text(unit.replace("/opt/parallel-dit/.venv/bin/python", "/bin/sh").replace("User=pdit\n", ""))
    found = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert not [line for line in found.stderr.splitlines() if "pdit.service" in line], found.stderr
