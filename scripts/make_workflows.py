"""Writes workflows/NAME.json, api/NAME.json and NAME.jpg for the families of workflow_recipes.py: one graph,
so that its forms agree.

    make_workflows.py OBJECT_INFO [NAME...]

OBJECT_INFO is a file with a running ComfyUI's response to /object_info: which inputs of a node are widgets,
and their order and defaults.
"""

import json
import math
import re
import sys
from pathlib import Path

from workflow_graphs import graph_of
from workflow_layout import WIDTH, best_layout, group_of, height_of
from workflow_recipes import NAMES
from workflow_thumbnails import demo_thumbnail, graph_thumbnail

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
#: Loader -> the folder of models in which its files are.
DIRECTORIES = {
    "LoadParallelDiT": "diffusion_models",
    "ParallelLoRA": "loras",
    "CLIPLoader": "text_encoders",
    "DualCLIPLoader": "text_encoders",
    "TripleCLIPLoader": "text_encoders",
    "QuadrupleCLIPLoader": "text_encoders",
    "LTXAVTextEncoderLoader": "text_encoders",
    "VAELoader": "vae",
    "CheckpointLoaderSimple": "checkpoints",
    "LTXVAudioVAELoader": "checkpoints",
    "CLIPVisionLoader": "clip_vision",
}
#: File -> where it is published, as in the templates of ComfyUI.
URLS = json.loads(Path(__file__).with_name("model_urls.json").read_text())
CATEGORY = "Parallel DiT"
#: Zoom at which the page opens a file; below 8/14 its canvas leaves all texts out. The template browser
#: fits the graph into the window instead.
SCALE = 0.6


def widgets_of(name: str, kind, options: dict) -> list[tuple[str, dict]]:
    """(name, options) of the widgets that an input is: none of a link; a choice that brings further inputs
    has those of its first option after it."""
    if kind == "COMFY_DYNAMICCOMBO_V3":
        first = options["options"][0]
        further = [
            widget
            for inner, (inner_kind, *more) in first["inputs"].get("required", {}).items()
            for widget in widgets_of(f"{name}.{inner}", inner_kind, (more or [{}])[0])
        ]
        return [] if options.get("hidden") else [(name, {**options, "default": first["key"]}), *further]
    return [(name, options)] if isinstance(kind, list) or set(kind.split(",")) <= WIDGETS else []


def inputs_of(info: dict, values: dict) -> tuple[list[tuple[str, str]], list[tuple[str, dict]]]:
    """(inputs that are linked as (name, type), widgets as (name, options)) of a node, in its own order; of
    inputs that grow in number those that are in ``values`` and one more."""
    linked, widgets = [], []
    for part in ("required", "optional"):
        for name in info["input_order"].get(part, []):
            kind, options = (*info["input"][part][name], {})[:2]
            if kind == "COMFY_AUTOGROW_V3":
                (one,) = options["template"]["input"]["required"].values()
                names = [f"{name}.{inner}" for inner in options["template"]["names"]]
                linked += [(name, one[0]) for name in names[: 1 + sum(name in values for name in names)]]
                continue
            found = widgets_of(name, kind, options)
            widgets += found
            if not found and not options.get("hidden"):
                linked.append((name, kind))
    return linked, widgets


def values_of(widgets: list[tuple[str, dict]], inputs: dict) -> list[tuple[str, object]]:
    """(name, value) in the order of a node's widgets, the default where another node gives it, with those
    that the page adds: what becomes of a seed, and the button that uploads."""
    values = []
    for name, options in widgets:
        value = inputs.get(name)
        if name not in inputs or isinstance(value, list):  # a list is a link to another node
            value = options["default"]
        values.append((name, value))
        values += [("control after generate", "randomize")] * bool(options.get("control_after_generate")) + [
            ("upload", "image")
        ] * bool(options.get("image_upload"))
    return values


def models_of(kind: str, inputs: dict) -> list[dict]:
    """What the page offers to download for a loader: name, url and folder of each of its files."""
    names = [value for value in inputs.values() if isinstance(value, str) and value in URLS]
    own = DIRECTORIES.get(kind, "")
    return [
        {"name": name, "url": URLS[name], "directory": "checkpoints" if key == "ckpt_name" else own}
        for key, name in ((key, inputs[key]) for key in inputs)
        if name in names and own
    ]


def gpus_of(graph: dict) -> str:
    """How many GPUs a graph asks for, all of them where it sets no degree."""
    configs = [node["inputs"] for node in graph.values() if node["class_type"] == "ParallelConfig"]
    degrees = [value for name, value in configs[0].items() if name.endswith("_degree")] if configs else []
    return f"{math.prod(degrees) if degrees else 'All'} GPUs"


def note_node(title: str, note: str, box: tuple[int, int, int, int]) -> dict:
    """The note of a graph in its box (left, top, width, height)."""
    return {
        "id": 1,
        "type": "MarkdownNote",
        "title": title,
        "pos": list(box[:2]),
        "size": list(box[2:]),
        "inputs": [],
        "outputs": [],
        "properties": {},
        "widgets_values": [note],
    }


def page_form(title: str, note: str, graph: dict, info: dict) -> dict:
    """The form that ComfyUI's page opens, of the form that /prompt takes."""
    nodes, grouped = [], []
    links = []
    for key, node in graph.items():
        kind = node["class_type"]
        linked, widgets = inputs_of(info[kind], node["inputs"])
        fed = [
            (name, info[kind]["input"]["required"][name][0])
            for name, _ in widgets
            if isinstance(node["inputs"].get(name), list)
        ]
        outputs = [
            {"name": name, "type": type_, "links": []}
            for name, type_ in zip(info[kind]["output_name"], info[kind]["output"], strict=True)
        ]
        values = values_of(widgets, node["inputs"])
        is_ours = info[kind]["category"] == CATEGORY
        height = height_of(kind, max(len(linked), len(outputs)), widgets, len(values), is_ours)
        models = models_of(kind, node["inputs"])
        made = {
            "id": int(key),
            "type": kind,
            "pos": [0, 0],
            "size": [WIDTH, height],
            "inputs": [],
            "outputs": outputs,
            "properties": {"Node name for S&R": kind} | ({"models": models} if models else {}),
            "widgets_values": [value for _, value in values],
        }
        if "_meta" in node:
            made["title"] = node["_meta"]["title"]
        for slot, (name, type_) in enumerate([*linked, *fed]):
            link = None
            if name in node["inputs"]:
                source, source_slot = node["inputs"][name]
                link = len(links) + 1
                links.append([link, int(source), source_slot, int(key), slot, type_])
            made["inputs"].append(
                {"name": name, "type": type_, "link": link}
                | ({"widget": {"name": name}} if (name, type_) in fed else {})
            )
        nodes.append(made)
        grouped.append((group_of(kind, info[kind]["output"]), made))
    layout = best_layout(grouped, note)
    layout.place()
    nodes.insert(0, note_node(title, note, layout.box))
    by_id = {node["id"]: node for node in nodes}
    for order, node in enumerate(nodes):
        node |= {"flags": {}, "order": order, "mode": 0}
    for link, source, slot, *_ in links:
        by_id[source]["outputs"][slot]["links"].append(link)
    return {
        "last_node_id": len(nodes),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": layout.boxes(),
        "config": {},
        "extra": {"ds": {"scale": SCALE, "offset": [150, 190]}},
        "version": 0.4,
    }


def main():
    info = json.loads(Path(sys.argv[1]).read_text())
    for name in sys.argv[2:] or NAMES:
        title, note, graph = graph_of(name)
        # bold, since Nodes 2.0 shows code in dark blue on brown
        note = re.sub("`([^`]+)`", r"**\1**", f"**{gpus_of(graph)}.** {note}")
        page = page_form(title, note, graph, info)
        (FOLDER / f"{name}.json").write_text(json.dumps(page, indent=2) + "\n")
        (FOLDER / "api" / f"{name}.json").write_text(
            json.dumps(
                {key: {part: node[part] for part in ("class_type", "inputs")} for key, node in graph.items()},
                indent=2,
            )
            + "\n"
        )
        picture = demo_thumbnail(title) if name == "demo" else graph_thumbnail(page)
        picture.save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
