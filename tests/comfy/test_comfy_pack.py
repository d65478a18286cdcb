"""The pack as a real ComfyUI lists it: nodes, tooltips, help, templates, import time."""

import json
import re
from dataclasses import asdict
from urllib.error import HTTPError

import locale_texts
import pytest
from comfy_server import PACK
from versions import skip_without_nodes

from backend.config import ParallelConfig

NODES = [
    "ParallelConfig",
    "LoadParallelDiT",
    "ParallelLoRA",
    "ParallelSampler",
    "ParallelSamplerAdvanced",
    "ParallelSamplerCustom",
    "ParallelModel",
    "LoadDiffusersCLIPVAE",
    "ParallelDemoLoader",
    "ParallelDoctor",
]
#: Widgets of Parallel Config in graphs from before it had a method, in their order.
SAVED_WIDGETS = (
    *("cfg_degree", "pipefusion_degree", "ulysses_degree", "ring_degree", "data_parallel_degree"),
    *("tensor_parallel_degree", "num_pipeline_patch", "warmup_steps", "attention", "device", "gpus"),
    *("address", "stale_kv", "attn_layer_num_for_pp", "split_scheme", "shard_weights"),
    "offload_modulation",
)
WORKFLOWS = sorted(path.stem for path in (PACK / "workflows" / "api").glob("*.json"))


def test_pack_loads_quickly(comfy):
    log = comfy.log.read_text(errors="replace")
    line = next(line for line in log.splitlines() if line.endswith("custom_nodes/parallel-dit"))
    assert "IMPORT FAILED" not in log
    # a crude limit: 0.2 on a quiet machine, above 5 with what ranks alone import (unit/test_pack_imports.py)
    assert float(re.search(r"([\d.]+) seconds", line)[1]) <= 3


@pytest.mark.parametrize("name", NODES)
def test_node(comfy, name):
    info = comfy.get(f"/object_info/{name}")[name]
    assert info["category"] == "Parallel DiT" and info["description"]
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    for key, (_, options) in inputs.items():
        assert options.get("tooltip"), key
    assert all(info["output_tooltips"])
    assert comfy.fetch(f"/extensions/parallel-dit/docs/{name}.md")


@pytest.mark.parametrize("word", ["multi gpu", "gpu", "xdit", "usp", "ulysses", "ring", "raylight", "fsdp"])
def test_the_search_finds_the_three_main_nodes(comfy, word):
    for name in ("ParallelConfig", "LoadParallelDiT", "ParallelSampler"):
        info = comfy.get(f"/object_info/{name}")[name]
        if "search_aliases" not in info:
            pytest.skip("this ComfyUI does not search by aliases")
        assert word in info["search_aliases"]


def test_config_inputs_all_have_defaults(comfy):
    info = comfy.get("/object_info/ParallelConfig")["ParallelConfig"]["input"]
    assert not info.get("required")
    defaults = {name: options["default"] for name, (_, options) in info["optional"].items()}
    assert defaults == {**asdict(ParallelConfig()), "method": "auto"}


def test_config_shows_one_number(comfy):
    """The rest is folded away; and new inputs are the last, so that saved widgets keep their places."""
    inputs = comfy.get("/object_info/ParallelConfig")["ParallelConfig"]["input"]["optional"]
    assert {name for name, (_, options) in inputs.items() if not options.get("advanced")} == {
        *("gpus", "method", "device")
    }
    assert list(inputs) == [*SAVED_WIDGETS, "method", "compile", "shares", "wire"]
    loader = comfy.get("/object_info/LoadParallelDiT")["LoadParallelDiT"]["input"]
    assert "config" in loader["optional"]


def test_seed_can_change_after_each_queue(comfy):
    seed = comfy.get("/object_info/ParallelSampler")["ParallelSampler"]["input"]["required"]["seed"][1]
    assert seed["control_after_generate"] is True and seed["max"] == 2**64 - 1


@pytest.mark.parametrize(
    "ours, theirs", [("ParallelSampler", "KSampler"), ("ParallelSamplerAdvanced", "KSamplerAdvanced")]
)
def test_inputs_are_those_of_comfyuis_sampler(comfy, ours, theirs):
    """The same names in the same order, with dit for model and shift behind them; the same ranges, and
    KSamplerAdvanced's defaults."""
    told = {name: comfy.get(f"/object_info/{name}")[name]["input"] for name in (ours, theirs)}
    names = {name: list(inputs["required"]) for name, inputs in told.items()}
    assert names[ours] == ["dit" if name == "model" else name for name in names[theirs]] and list(
        told[ours]["optional"]
    ) == ["shift"]
    for name in names[theirs][1:]:
        mine, native = (told[node]["required"][name] for node in (ours, theirs))
        compared = ("min", "max", "step", "round") + ("default",) * (ours == "ParallelSamplerAdvanced")
        if len(native) > 1 and native[0] in ("INT", "FLOAT"):
            assert {key: mine[1].get(key) for key in compared} == {
                key: native[1].get(key) for key in compared
            }, name


def test_templates_are_exactly_the_workflows(comfy):
    """ComfyUI lists every file of workflows/ as a template, and a graph for /prompt opens empty."""
    assert sorted(comfy.get("/workflow_templates")["parallel-dit"]) == WORKFLOWS


def test_blueprint_is_offered_and_wired_as_the_nodes_are(comfy):
    """ComfyUI lists it, and its links end at inputs and outputs of those names and types."""
    name = "Load + sample on all GPUs"
    try:
        listed = comfy.get("/global_subgraphs")
    except HTTPError:
        pytest.skip("this ComfyUI takes no blueprints of packs")
    (key,) = [key for key, entry in listed.items() if entry["name"] == name]
    page = json.loads(comfy.get(f"/global_subgraphs/{key}")["data"])
    (inside,) = page["definitions"]["subgraphs"]
    known = comfy.get("/object_info")
    nodes = {node["id"]: node for node in inside["nodes"]}
    for link in inside["links"]:
        if link["target_id"] in nodes:
            entry = nodes[link["target_id"]]["inputs"][link["target_slot"]]
            assert entry["link"] == link["id"] and entry["type"] == link["type"]
        if link["origin_id"] in nodes:
            kind = nodes[link["origin_id"]]["type"]
            assert known[kind]["output"][link["origin_slot"]] == link["type"]
    for node, widget in page["nodes"][0]["properties"]["proxyWidgets"]:
        widgets = widgets_of(known[nodes[int(node)]["type"]])
        control = widget == "control_after_generate" and widgets["seed"].get(widget)  # which the page adds
        assert control or widget in widgets


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_is_a_template(comfy, name):
    graph = json.loads(comfy.fetch(f"/api/workflow_templates/parallel-dit/{name}.json"))
    assert comfy.fetch(f"/api/workflow_templates/parallel-dit/{name}.jpg")[:2] == b"\xff\xd8"
    known = comfy.get("/object_info")
    api = json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text())
    for inputs in (node["inputs"] for node in api.values() if node["class_type"] == "SaveVideo"):
        # what older versions call it, which the API form has, too
        assert inputs.pop("codec", inputs["format.codec"]) == inputs["format.codec"]
    skip_without_nodes(api, known)
    assert as_prompt(graph, known) == {key: with_defaults(node, known) for key, node in api.items()}


def widgets_of(info: dict) -> dict[str, dict]:
    """Name -> options of the inputs that are widgets, in the node's order."""
    inputs, widgets = (
        [
            (name, *(*info["input"][part][name], {})[:2])
            for part in ("required", "optional")
            for name in info["input_order"].get(part, [])
        ],
        {},
    )
    for name, kind, options in inputs:
        if kind == "COMFY_DYNAMICCOMBO_V3" and not options.get(
            "hidden"
        ):  # its first option's own inputs stand behind it
            widgets |= {name: options} | {
                f"{name}.{inner}": {} for inner in options["options"][0]["inputs"].get("required", {})
            }
        elif isinstance(kind, list) or set(kind.split(",")) <= {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}:
            widgets[name] = options
    return widgets


def with_defaults(node: dict, known: dict) -> dict:
    defaults = {
        name: options["default"]
        for name, options in widgets_of(known[node["class_type"]]).items()
        if "default" in options
    }
    return {"class_type": node["class_type"], "inputs": defaults | node["inputs"]}


def as_prompt(graph: dict, known: dict) -> dict:
    """What ComfyUI's page would post of a graph: widgets by position, links by number."""
    links = {link: [str(source), slot] for link, source, slot, *_ in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] not in known:  # a note
            continue
        values, inputs = iter(node["widgets_values"]), {}
        for name, options in widgets_of(known[node["type"]]).items():
            inputs[name] = next(values, options.get("default"))
            if options.get("control_after_generate"):
                next(values)
        linked = {
            entry["name"]: links[entry["link"]] for entry in node["inputs"] if entry["link"] is not None
        }
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs | linked}
    return prompt


def test_every_text_of_a_node_is_in_both_languages(comfy):
    """ComfyUI serves them as /i18n; English is what the schemas say (scripts/locale_texts.py --write)."""
    served = comfy.get("/i18n")
    texts = locale_texts.node_definitions(comfy.get("/object_info"))
    for node, text in texts.items():
        assert served["en"]["nodeDefs"][node] == text
        assert locale_texts.paths_of(served["zh"]["nodeDefs"][node]) == locale_texts.paths_of(text)
