"""What the schemas of all nodes share: category, and words by which people look for them."""

from dataclasses import fields

from comfy_api.latest import io

CATEGORY = "Parallel DiT"
#: What people who look for more than one GPU type into ComfyUI's search.
ALIASES = [
    *(
        "multi gpu",
        "multigpu",
        "gpu",
        "distributed",
        "parallel",
        "xdit",
        "usp",
        "ulysses",
        "ring",
        "raylight",
    ),
    *("pipefusion", "sequence parallel", "tensor parallel", "fsdp", "cfg parallel"),
]


def schema(*aliases: str, **values) -> io.Schema:
    """Return the io.Schema of a node in the pack's category that is found by ``aliases``, where this ComfyUI
    searches by them."""
    if any(field.name == "search_aliases" for field in fields(io.Schema)):
        values["search_aliases"] = list(aliases)
    return io.Schema(category=CATEGORY, **values)
