"""The graph that somebody queues, while ComfyUI validates it, and the one that runs. ``validate_inputs`` of a
node is given its own values alone: ComfyUI hands a graph to every prompt handler right before it validates
it, in the same task, so a context variable brings it there."""

import importlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context

from .number_expressions import computed, resolution

_queued: ContextVar[dict | None] = ContextVar("queued graph", default=None)
_queued_by: ContextVar[str | None] = ContextVar("page that has queued it", default=None)
#: Nodes that hand a PARALLEL_DIT on.
THROUGH = ("ParallelLoRA",)
#: ComfyUI's nodes that hand one of two inputs on: the first where their input ``switch`` is false; the second
#: node may have one of them alone. And the one that does not hand on its only input, ``value``.
SWITCHES, SWITCHED = ("ComfySwitchNode", "ComfySoftSwitchNode"), ("on_false", "on_true")
NOT = "ComfyNotNode"
#: ComfyUI's node that computes a number (FLOAT, INT) of its inputs of this prefix.
MATH, MATH_VALUES = "ComfyMathExpression", "values."
#: ComfyUI's node that computes a width and a height of these inputs.
RESOLUTION, RESOLUTION_OF = "ResolutionSelector", ("aspect_ratio", "megapixels", "multiple")
#: More outputs are not followed for one input: Python's stack ends at a few hundred in a row.
MAX_FOLLOWED = 100


def note_queued(request: dict) -> dict:
    """Keep the graph of a POST to /prompt; ComfyUI's prompt handler."""
    _queued.set(request.get("prompt") or {})
    _queued_by.set(str(request.get("client_id") or ""))
    return request


def queued() -> dict:
    """Return the graph that is validated now, node id -> {"class_type", "inputs"}; empty outside of that."""
    return _queued.get() or {}


def queued_by() -> str | None:
    """Return the id of the page that has queued the graph that is validated now, empty for a script; None
    while none is validated."""
    return _queued_by.get()


def running() -> dict:
    """Return the graph that ComfyUI runs now, or ran last, as ``queued`` does, with the nodes that nodes have
    added."""
    graph = get_progress_state().dynprompt
    return {key: graph.get_node(key) for key in graph.all_node_ids()}


def executes(kind: str) -> bool:
    """Return whether ComfyUI executes a graph with a node of this type now, whichever node it is at."""
    from server import PromptServer  # ComfyUI's own, whole only once the server is up

    items = list(PromptServer.instance.prompt_queue.currently_running.values())
    graphs = [graph for _, _, graph, *_ in items]
    return any(node.get("class_type") == kind for graph in graphs for node in graph.values())


def validated() -> str:
    """Return the id of the node that is validated now; empty outside of that."""
    context = get_executing_context()
    return context.node_id if context else ""


def values(graph: dict, node: str) -> dict:
    """Return the inputs of a node that are values, not links."""
    inputs = graph.get(node, {}).get("inputs", {})
    return {name: value for name, value in inputs.items() if not isinstance(value, list)}


def constants(graph: dict, node: str) -> dict:
    """Return what a graph tells of a node's inputs: values, and those of nodes that hand one on as it is."""
    names = graph.get(node, {}).get("inputs", {})
    found = ((name, constant(graph, node, name)) for name in names)
    return {name: value for name, value in found if value is not None}


def constant(graph: dict, node: str, name: str, known: dict[tuple, Any] | None = None) -> Any:
    """Return the value of an input, also of one that is linked to a node whose one input is ``value``
    (PrimitiveInt), to a Switch, to a Math Expression or to a Resolution Selector; None where that takes a
    run. ``known``: the outputs that are known by now, None of one on the way here: that is a cycle."""
    origin = source(graph, node, name)
    if origin is None:
        given = graph[node]["inputs"].get(name)
        return None if isinstance(given, list) else given
    known = {} if known is None else known
    output = graph[node]["inputs"][name][1]
    if (origin, output) not in known:
        if len(known) == MAX_FOLLOWED:
            return None
        known[origin, output] = None
        known[origin, output] = _output(graph, origin, output, known)
    return known[origin, output]


def _output(graph: dict, node: str, output: int, known: dict[tuple, Any]) -> Any:
    """Return the value of an output of a node, as ``constant`` does."""
    kind = graph[node].get("class_type")
    if graph[node]["inputs"].keys() == {"value"} and kind != NOT:
        return constant(graph, node, "value", known)
    if kind == MATH:
        return _computed(graph, node, output, known)
    if kind == RESOLUTION:
        sides = resolution(*(constant(graph, node, name, known) for name in RESOLUTION_OF))
        return sides[output] if sides and output in (0, 1) else None
    switched = constant(graph, node, "switch", known) if kind in SWITCHES else None
    return None if switched is None else constant(graph, node, SWITCHED[bool(switched)], known)


def _computed(graph: dict, node: str, output: int, known: dict[tuple, Any]) -> float | None:
    """Return an output of a Math Expression, a FLOAT or an INT; None of others, and where it takes a run."""
    expression = constant(graph, node, "expression", known)
    named = (name for name in graph[node]["inputs"] if name.startswith(MATH_VALUES))
    values = {name.removeprefix(MATH_VALUES): constant(graph, node, name, known) for name in named}
    if not isinstance(expression, str) or not all(isinstance(each, int | float) for each in values.values()):
        return None
    result = computed(expression, values)
    if result is None or output not in (0, 1):
        return None
    return int(result) if output else float(result)


def source(graph: dict, node: str, name: str) -> str | None:
    """Return the id of the node that an input is linked to; None where it is not."""
    link = graph.get(node, {}).get("inputs", {}).get(name)
    return link[0] if isinstance(link, list) and len(link) == 2 and link[0] in graph else None


def ancestors(graph: dict, nodes: Iterable[str]) -> set[str]:
    """Return the ids of nodes and of all that they depend on."""
    ids: set[str] = set()
    waiting = list(nodes)
    while waiting:
        key = waiting.pop()
        if key not in ids:
            ids.add(key)
            linked = [source(graph, key, name) for name in _used_inputs(graph, key)]
            waiting += [each for each in linked if each is not None]
    return ids


def upstream(graph: dict, node: str, words: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield a node and those before it, along one link of each, and the number of the output that is linked:
    of the inputs whose names have one of ``words``, those of the first word first; of a Switch the side that
    it takes, the first where that takes a run."""
    seen = set()
    output = 0
    while node in graph and node not in seen:
        seen.add(node)
        yield node, output
        inputs = graph[node]["inputs"]
        if graph[node].get("class_type") in SWITCHES:
            named = list(_sides(graph, node))
        else:
            named = [name for word in words for name in inputs if word in name]
        linked = (inputs[name] for name in named if source(graph, node, name))
        node, output = next(linked, ("", 0))


def positive(inputs: dict, name: str, default: int) -> int:
    """Return the constant input ``name``, a number from 1 up; ``default`` where it is not one."""
    value = inputs.get(name)
    return value if isinstance(value, int) and value > 0 else default


def executed(graph: dict, node: str) -> dict:
    """Return what ComfyUI runs of a graph, output nodes and all that they depend on; the whole graph where
    this leaves out ``node``, which runs."""
    classes = importlib.import_module("nodes").NODE_CLASS_MAPPINGS  # whole only once every pack is imported
    kinds = ((key, classes.get(each.get("class_type"))) for key, each in graph.items())
    found = ancestors(graph, [key for key, kind in kinds if getattr(kind, "OUTPUT_NODE", False)])
    return {key: each for key, each in graph.items() if key in found} if node in found else graph


def loader_of(graph: dict, node: str) -> str | None:
    """Return the Load Parallel DiT whose transformer reaches the input ``dit`` of a node; None where there is
    none, or where it depends on a Switch whose side takes a run."""
    return _loader_before(graph, source(graph, node, "dit"), {})


def _loader_before(graph: dict, node: str | None, known: dict[str, str | None]) -> str | None:
    """Return ``node`` where it is a loader, else the one that all its inputs are from. ``known``: those that
    are known by now, None of a node after it: that is a cycle, which ComfyUI itself refuses."""
    if node is None:
        return None
    if node in known:
        return known[node]
    known[node] = None
    kind = graph[node].get("class_type")
    names: Iterable[str] = ()
    if kind == "LoadParallelDiT":
        known[node] = node
    elif kind in THROUGH:
        names = ("dit",)
    elif kind in SWITCHES:
        names = _sides(graph, node)
    loaders = {_loader_before(graph, source(graph, node, name), known) for name in names}
    if len(loaders) == 1:
        known[node] = loaders.pop()
    return known[node]


def _used_inputs(graph: dict, node: str) -> Iterable[str]:
    """Return the inputs of a node that ComfyUI runs: of a Switch the side it takes, as far as is known."""
    is_switch = graph[node].get("class_type") in SWITCHES
    return ("switch", *_sides(graph, node)) if is_switch else graph[node]["inputs"]


def _sides(graph: dict, switch: str) -> tuple[str, ...]:
    """Return the inputs of a Switch that it may hand on: one, where a constant tells which."""
    linked = tuple(name for name in SWITCHED if source(graph, switch, name))
    on = constant(graph, switch, "switch")
    return linked if on is None or len(linked) == 1 else (SWITCHED[bool(on)],)


def samplers_of(graph: dict, loader: str) -> Iterator[dict]:
    """Yield the constant inputs of every sampler of this pack that a Load Parallel DiT feeds."""
    for key, node in graph.items():
        if node.get("class_type", "").startswith("ParallelSampler") and loader_of(graph, key) == loader:
            yield constants(graph, key)
