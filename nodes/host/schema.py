"""What the schemas of all nodes share: category, words by which people look for them, own socket types."""

from dataclasses import fields

from comfy_api.latest import io

ParallelConfigType = io.Custom("PARALLEL_CONFIG")
ParallelDiTType = io.Custom("PARALLEL_DIT")
CATEGORY = "Parallel DiT"
#: What people who look for more than one GPU type into ComfyUI's search.
ALIASES = (
    "multi gpu,multigpu,gpu,distributed,parallel,xdit,usp,ulysses,ring,raylight,pipefusion,"
    "sequence parallel,tensor parallel,fsdp,cfg parallel"
).split(",")


def schema(*aliases: str, reports: bool = False, **values) -> io.Schema:
    """Return the io.Schema of a node in the pack's category that is found by ``aliases``. ``reports``: lines
    stand under it, which the page is sent again where the node is cached. Both where this ComfyUI has it."""
    newer = {"search_aliases": list(aliases), "has_intermediate_output": reports}
    known = {field.name for field in fields(io.Schema)}
    values |= {name: value for name, value in newer.items() if name in known}
    return io.Schema(category=CATEGORY, **values)


def advanced(widget: io.WidgetInput) -> io.WidgetInput:
    """Have a widget folded away where ComfyUI knows advanced inputs. Versions differ in how it is given one:
    0.3.64 takes no such argument for each kind of widget."""
    widget.extra_dict = {**widget.extra_dict, "advanced": True}
    return widget
