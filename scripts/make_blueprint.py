"""Writes subgraphs/NAME.json, the blueprint that ComfyUI offers among its nodes: loader and sampler in one.

make_blueprint.py OBJECT_INFO     # as make_workflows.py
"""

import json
import sys
import uuid
from pathlib import Path

from make_workflows import WIDTH, inputs_of, values_of

NAME = "Load + sample on all GPUs"
DESCRIPTION = "Loads a diffusion transformer on all GPUs and samples with it, as KSampler does."
FOLDER = Path(__file__).resolve().parents[1] / "subgraphs"
LOADER, SAMPLER, INPUT, OUTPUT = 1, 2, -10, -20
#: What the subgraph takes: name, node inside.
TAKES = (("config", LOADER), ("positive", SAMPLER), ("negative", SAMPLER), ("latent_image", SAMPLER))
#: Widgets that stand on it.
SHOWN = ((LOADER, "model_name"), (LOADER, "weight_dtype")) + tuple(
    (SAMPLER, name) for name in ("seed", "steps", "cfg", "sampler_name", "scheduler", "denoise", "shift")
)


def identity(name: str) -> str:
    """The same UUID for a name each time."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"parallel-dit/{NAME}/{name}"))


def node(key: int, kind: str, left: int, info: dict, links: dict) -> dict:
    """A node inside; ``links``: input -> id of its link."""
    linked, widgets = inputs_of(info[kind], {})
    values = values_of(widgets, {"model_name": ""})  # which has no default
    outputs = zip(info[kind]["output_name"], info[kind]["output"], strict=True)
    return {
        "id": key,
        "type": kind,
        "pos": [left, 0],
        "size": [WIDTH, 420],
        "flags": {},
        "order": key,
        "mode": 0,
        "inputs": [{"name": name, "type": type_, "link": links.get(name)} for name, type_ in linked],
        "outputs": [{"name": name, "type": type_, "links": [links["output"]]} for name, type_ in outputs],
        "properties": {"Node name for S&R": kind},
        "widgets_values": [value for _, value in values],
    }


def link(key: int, origin: tuple[int, int], target: tuple[int, int], kind: str) -> dict:
    """A link inside, between (node, slot) and (node, slot)."""
    ends = {
        "origin_id": origin[0],
        "origin_slot": origin[1],
        "target_id": target[0],
        "target_slot": target[1],
    }
    return {"id": key, **ends, "type": kind}


def blueprint(info: dict) -> dict:
    """The file, of a running ComfyUI's /object_info."""
    kinds = {LOADER: "LoadParallelDiT", SAMPLER: "ParallelSampler"}
    slots = {key: [name for name, _ in inputs_of(info[kind], {})[0]] for key, kind in kinds.items()}
    types = {key: dict(inputs_of(info[kind], {})[0]) for key, kind in kinds.items()}
    links = [
        link(i, (INPUT, i - 1), (key, slots[key].index(name)), types[key][name])
        for i, (name, key) in enumerate(TAKES, 1)
    ]
    dit, latent = len(TAKES) + 1, len(TAKES) + 2
    links.append(link(dit, (LOADER, 0), (SAMPLER, slots[SAMPLER].index("dit")), "PARALLEL_DIT"))
    links.append(link(latent, (SAMPLER, 0), (OUTPUT, 0), "LATENT"))
    inside = [
        node(LOADER, kinds[LOADER], 0, info, {"config": 1, "output": dit}),
        node(
            SAMPLER,
            kinds[SAMPLER],
            WIDTH + 80,
            info,
            {
                **{name: i for i, (name, key) in enumerate(TAKES, 1) if key == SAMPLER},
                "dit": dit,
                "output": latent,
            },
        ),
    ]
    inputs = [{"name": name, "type": types[key][name], "link": None} for name, key in TAKES]
    definition = {
        "id": identity("subgraph"),
        "version": 1,
        "state": {"lastGroupId": 0, "lastNodeId": SAMPLER, "lastLinkId": latent, "lastRerouteId": 0},
        "revision": 0,
        "config": {},
        "name": NAME,
        "inputNode": {"id": INPUT, "bounding": [-260, 40, 140, 140]},
        "outputNode": {"id": OUTPUT, "bounding": [2 * WIDTH + 180, 40, 120, 60]},
        "inputs": [
            {"id": identity(name), "name": name, "type": types[key][name], "linkIds": [i]}
            for i, (name, key) in enumerate(TAKES, 1)
        ],
        "outputs": [{"id": identity("latent"), "name": "latent", "type": "LATENT", "linkIds": [latent]}],
        "widgets": [],
        "nodes": inside,
        "groups": [],
        "links": links,
        "extra": {},
        "category": "Parallel DiT",
        "description": DESCRIPTION,
    }
    outer = {
        "id": 1,
        "type": definition["id"],
        "pos": [0, 0],
        "size": [WIDTH, 520],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": inputs,
        "outputs": [{"name": "latent", "type": "LATENT", "links": []}],
        "properties": {"proxyWidgets": [[str(key), name] for key, name in SHOWN]},
        "widgets_values": [],
        "title": NAME,
    }
    return {
        "revision": 0,
        "last_node_id": 1,
        "last_link_id": 0,
        "nodes": [outer],
        "links": [],
        "version": 0.4,
        "definitions": {"subgraphs": [definition]},
        "extra": {},
    }


def main():
    info = json.loads(Path(sys.argv[1]).read_text())
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{NAME}.json").write_text(json.dumps(blueprint(info), indent=2) + "\n")


if __name__ == "__main__":
    main()
