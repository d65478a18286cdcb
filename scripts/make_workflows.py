"""Writes workflows/NAME.json and NAME.jpg, what ComfyUI's page opens and shows, of workflows/api/NAME.json.

    make_workflows.py OBJECT_INFO [NAME...]

The API form is the source: its nodes are numbered from 2, and those with a title of their own have it under
``_meta``. Only the note, node 1, is read from the page form. OBJECT_INFO is a file with a running ComfyUI's
response to /object_info: which inputs of a node are widgets, and their order and defaults.
"""

import json
import sys
from pathlib import Path

from workflow_layout import WIDTH, best_layout, height_of
from workflow_thumbnails import graph_thumbnail

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
#: Loader -> the folder of models in which its files are, but for checkpoints.
DIRECTORIES = {
    "LoadParallelDiT": "diffusion_models",
    "ParallelLoRA": "loras",
    "CLIPLoader": "text_encoders",
    "DualCLIPLoader": "text_encoders",
    "TripleCLIPLoader": "text_encoders",
    "QuadrupleCLIPLoader": "text_encoders",
    "LTXAVTextEncoderLoader": "text_encoders",
    "VAELoader": "vae",
    "CLIPVisionLoader": "clip_vision",
    "LatentUpscaleModelLoader": "latent_upscale_models",
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
            of_input = widgets_of(name, kind, options)
            widgets += of_input
            if not of_input and not options.get("hidden"):
                linked.append((name, kind))
    return linked, widgets


def values_of(widgets: list[tuple[str, dict]], inputs: dict) -> list:
    """Return the values of a node's widgets in their order, the default where another node gives it, and
    those that the page adds: what becomes of a seed, and the button that uploads."""
    values = []
    for name, options in widgets:
        is_linked = isinstance(inputs.get(name), list)
        values.append(options.get("default", "") if is_linked or name not in inputs else inputs[name])
        if options.get("control_after_generate"):
            draws = inputs.get("add_noise") != "disable"  # else a new seed runs the same steps again
            values.append("randomize" if draws else "fixed")
        if options.get("image_upload"):
            values.append("image")
    return values


def checkpoints_of(graph: dict) -> set[str]:
    """Return the all-in-one files of a graph: one place serves all loaders that take a part of one."""
    return {node["inputs"]["ckpt_name"] for node in graph.values() if "ckpt_name" in node["inputs"]}


def models_of(kind: str, inputs: dict, checkpoints: set[str]) -> list[dict]:
    """Return what the page offers to download for a loader: name, url and folder of each of its files."""
    files = [value for value in inputs.values() if isinstance(value, str) and value in URLS]
    return [
        {
            "name": name,
            "url": URLS[name],
            "directory": "checkpoints" if name in checkpoints else DIRECTORIES[kind],
        }
        for name in files
    ]


def page_node(key: str, node: dict, info: dict, checkpoints: set[str]) -> dict:
    """Return a node of the API form as the page has it, without place and links; ``info``: of its type;
    ``checkpoints``: the graph's all-in-one files."""
    kind, given = node["class_type"], node["inputs"]
    linked, widgets = inputs_of(info, given)
    inputs = [{"name": name, "type": type_, "link": None} for name, type_ in linked]
    fed = [name for name, _ in widgets if isinstance(given.get(name), list)]
    inputs += [
        {"name": name, "type": info["input"]["required"][name][0], "link": None, "widget": {"name": name}}
        for name in fed
    ]
    outputs = zip(info["output_name"], info["output"], strict=True)
    values, models = values_of(widgets, given), models_of(kind, given, checkpoints)
    slots = max(len(linked), len(info["output"]))
    height = height_of(kind, slots, widgets, len(values), info["category"] == CATEGORY)
    return {
        "id": int(key),
        "type": kind,
        "pos": [0, 0],
        "size": [WIDTH, height],
        "inputs": inputs,
        "outputs": [{"name": name, "type": type_, "links": []} for name, type_ in outputs],
        "properties": {"Node name for S&R": kind} | ({"models": models} if models else {}),
        "widgets_values": values,
        **node.get("_meta", {}),  # its title
    }


def connect(nodes: dict[str, dict], graph: dict) -> list[list]:
    """Write the links of the API form into the page's nodes, and return them as the page has them."""
    links = []
    for key, node in nodes.items():
        for slot, entry in enumerate(node["inputs"]):
            if entry["name"] not in graph[key]["inputs"]:
                continue
            source, source_slot = graph[key]["inputs"][entry["name"]]
            entry["link"] = len(links) + 1
            nodes[source]["outputs"][source_slot]["links"].append(entry["link"])
            links.append([entry["link"], int(source), source_slot, int(key), slot, entry["type"]])
    return links


def page_form(note: dict, graph: dict, info: dict) -> dict:
    """Return the form that ComfyUI's page opens, of the form that /prompt takes and the node of its note."""
    checkpoints = checkpoints_of(graph)
    made = {key: page_node(key, node, info[node["class_type"]], checkpoints) for key, node in graph.items()}
    links = connect(made, graph)
    layout = best_layout(list(made.values()), note["widgets_values"][0])
    layout.place()
    note |= {"pos": list(layout.box[:2]), "size": list(layout.box[2:])}
    nodes = [note, *made.values()]
    for order, node in enumerate(nodes):
        node |= {"flags": {}, "order": order, "mode": 0}
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
    for name in sys.argv[2:] or sorted(path.stem for path in (FOLDER / "api").glob("*.json")):
        path = FOLDER / f"{name}.json"
        graph = json.loads((FOLDER / "api" / path.name).read_text())
        note = json.loads(path.read_text())["nodes"][0]
        page = page_form(note, graph, info)
        path.write_text(json.dumps(page, indent=2) + "\n")
        if name != "demo":  # whose thumbnail is what its model painted
            graph_thumbnail(page).save(path.with_suffix(".jpg"), quality=88)


if __name__ == "__main__":
    main()
