"""Writes workflows/NAME.json, api/NAME.json and NAME.jpg for the families of workflow_recipes.py: one graph,
so that its forms agree.

    make_workflows.py OBJECT_INFO [NAME...]

OBJECT_INFO is a file with a running ComfyUI's response to /object_info: which inputs of a node are widgets,
and their order and defaults.
"""

import json
import sys
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont
from workflow_recipes import RECIPES, graph_of

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}
#: Column of a node by what it makes; the rest is where it is sampled.
COLUMNS = {
    0: {"CLIP", "VAE", "PARALLEL_CONFIG", "MODEL", "IMAGE", "CLIP_VISION"},
    1: {"PARALLEL_DIT", "CONDITIONING", "LATENT", "NOISE", "SIGMAS"},
}
LAST = {
    "VAEDecode",
    "SaveImage",
    "SaveAnimatedWEBP",
    "SaveVideo",
    "CreateVideo",
    "LTXVAudioVAEDecode",
    "VAEDecodeAudio",
}
COLOURS = {
    "CLIP": "#ffd500",
    "VAE": "#ff6e6e",
    "CONDITIONING": "#ffa931",
    "LATENT": "#ff9cf9",
    "IMAGE": "#64b5f6",
    "PARALLEL_DIT": "#9fd49f",
    "PARALLEL_CONFIG": "#9fb0d4",
}
WIDTH, GAP, TITLE = 320, 60, 30


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


def column_of(kind: str, outputs: list[str]) -> int:
    if kind in LAST:
        return 3
    if kind.startswith(("ParallelSampler", "SamplerCustom", "LTXVSeparate")):
        return 2
    return next((column for column, makes in COLUMNS.items() if outputs and outputs[0] in makes), 2)


def page_form(title: str, note: str, graph: dict, info: dict) -> dict:
    """The form that ComfyUI's page opens, of the form that /prompt takes."""
    nodes = [
        {
            "id": 1,
            "type": "MarkdownNote",
            "title": title,
            "pos": [0, -230],
            "size": [700, 170],
            "inputs": [],
            "outputs": [],
            "properties": {},
            "widgets_values": [note],
        }
    ]
    links, heights = [], [0, 0, 0, 0]
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
        column = column_of(kind, info[kind]["output"])
        values = values_of(widgets, node["inputs"])
        height = (
            46
            + 22 * max(len(linked), len(outputs))
            + 25 * len(values)
            + 70 * sum(bool(options.get("multiline")) for _, options in widgets)
            + 260 * (kind in ("SaveImage", "SaveAnimatedWEBP", "SaveVideo", "LoadImage"))
        )
        made = {
            "id": int(key),
            "type": kind,
            "pos": [column * (WIDTH + GAP), heights[column]],
            "size": [WIDTH, height],
            "inputs": [],
            "outputs": outputs,
            "properties": {"Node name for S&R": kind},
            "widgets_values": [value for _, value in values],
        }
        heights[column] += height + TITLE + 20
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
        "groups": [],
        "config": {},
        "extra": {"ds": {"scale": 0.7, "offset": [60, 260]}},
        "version": 0.4,
    }


def wrap_note(text: str, width: int = 84) -> list[str]:
    return [row for line in text.split("\n") for row in wrap(line, width)]


def screenshot(page: dict, info: dict, size=(768, 512)) -> Image.Image:
    """The graph as boxes and links, for the template browser."""
    right = max(node["pos"][0] + node["size"][0] for node in page["nodes"])
    bottom = max(node["pos"][1] + node["size"][1] for node in page["nodes"])
    scale = 2 * min((size[0] - 24) / right, (size[1] - 24) / (bottom + 290))
    left = (2 * size[0] - right * scale) / 2

    def at(x, y):
        return left + x * scale, 24 + (y + 265) * scale

    image = Image.new("RGB", (2 * size[0], 2 * size[1]), "#202020")
    draw = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(max(20 * scale, 10)), ImageFont.load_default(max(15 * scale, 8))
    by_id = {node["id"]: node for node in page["nodes"]}
    for _, source, source_slot, target, slot, type_ in page["links"]:
        a, b = by_id[source], by_id[target]
        x0, y0 = at(a["pos"][0] + a["size"][0], a["pos"][1] + 14 + 22 * source_slot)
        x1, y1 = at(b["pos"][0], b["pos"][1] + 14 + 22 * slot)
        bend = max(abs(x1 - x0) / 2, 40 * scale)
        steps = [i / 24 for i in range(25)]
        curve = [
            (
                (1 - t) ** 3 * x0
                + 3 * (1 - t) ** 2 * t * (x0 + bend)
                + 3 * (1 - t) * t * t * (x1 - bend)
                + t**3 * x1,
                y0 + (3 * t * t - 2 * t**3) * (y1 - y0),
            )
            for t in steps
        ]
        draw.line(curve, fill=COLOURS.get(type_, "#aaaaaa"), width=max(round(4 * scale), 2))
    for node in page["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        is_note = node["type"] == "MarkdownNote"
        draw.rounded_rectangle(
            (*at(x, y - TITLE), *at(x + width, y + height)),
            8 * scale,
            fill="#65552c" if is_note else "#353535",
            outline="#111111",
        )
        widgets = [] if is_note else inputs_of(info[node["type"]], {})[1]
        names = [name for name, _ in values_of(widgets, dict.fromkeys(name for name, _ in widgets))]
        draw.text(
            at(x + 14, y - TITLE + 5),
            node.get("title") or info[node["type"]]["display_name"] or node["type"],
            fill="#dddddd",
            font=font,
        )
        lines = (
            wrap_note(node["widgets_values"][0])
            if is_note
            else [f"{name}  {value}"[:36] for name, value in zip(names, node["widgets_values"], strict=True)]
        )
        for row, line in enumerate(lines):
            top = y + 12 + (22 * max(len(node["inputs"]), len(node["outputs"])) + 25 * row)
            if top + 20 < y + height:
                draw.text(at(x + 14, top), line, fill="#bbbbbb", font=small)
    return image.resize(size, Image.Resampling.LANCZOS)


def main():
    info = json.loads(Path(sys.argv[1]).read_text())
    for name in sys.argv[2:] or RECIPES:
        title, note, graph = graph_of(name)
        page = page_form(title, note, graph, info)
        (FOLDER / f"{name}.json").write_text(json.dumps(page, indent=2) + "\n")
        (FOLDER / "api" / f"{name}.json").write_text(
            json.dumps(
                {key: {part: node[part] for part in ("class_type", "inputs")} for key, node in graph.items()},
                indent=2,
            )
            + "\n"
        )
        screenshot(page, info).save(FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
