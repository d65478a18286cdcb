"""What the side panel's benchmark queues: the graph up to a sampler, once for each way to share its work."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch

from ...backend.client import pool
from ...backend.client.auto import planning
from ...backend.config import ConfigError, ParallelConfig
from ...backend.planner.auto_config import PLANNED, AutoConfig
from ...backend.planner.choose import EXACT, MANUAL, Question
from ...backend.planner.option import Option
from ...backend.runtime.callbacks import nothing
from ..graph.queued_config import config_in
from ..graph.queued_graph import ancestors, loader_of, source, values
from ..host.auto_plan import question_for_page
from ..host.graph_requests import request_of_graph
from ..host.model_files import model_choice_of, model_folders

#: Ways to share the work that are tried, those with the best estimates, besides one rank alone.
MAX_CANDIDATES = 5
#: The node that a graph gets where its loader has no Parallel Config; no id of a page looks so.
CONFIG = "parallel-dit-trial"
SEEDS = ("seed", "noise_seed")
#: Seeds of trials are drawn from so many.
SEED_COUNT = 1 << 32


def trials(graph: dict, selected: str = "", check: Callable[[], None] = nothing) -> dict:
    """Return {"sampler", "loader", "config": node ids (config empty where the graph has none), "trials"}.

    Each trial: ``name``; how many ``ranks``; ``inputs`` of Parallel Config; ``prompts`` to queue one after
    the other, the same but for the seed; ``projected`` seconds of a run. ``selected``: a sampler of
    this pack in the API ``graph``, else the first one is taken. ``check`` is called while the machine is
    measured, and may raise. Raises ConfigError, RefusedError or BackendError.
    """
    sampler = next((key for key in (selected, *graph) if _is_sampler(graph, key)), "")
    loader = loader_of(graph, sampler)
    if loader is None:
        raise ConfigError("the graph has no Parallel Sampler on a Load Parallel DiT; add them and try again.")
    graph = {key: graph[key] for key in ancestors(graph, [sampler])}
    config = source(graph, loader, "config")
    auto = _auto(_config_of(graph, config))
    entries = []
    question, devices = _question(graph, loader, auto, check)
    for option in options_to_try(question, auto.method == EXACT):
        inputs = inputs_of(auto, option.plan, question, devices)
        prompts = _prompts(graph, sampler, loader, config or CONFIG, inputs)
        about = {"name": option.name, "ranks": option.plan.world_size, "projected": option.seconds}
        entries.append({**about, "inputs": inputs, "prompts": prompts})
    return {"sampler": sampler, "loader": loader, "config": config or "", "trials": entries}


def options_to_try(question: Question, exact: bool = False) -> list[Option]:
    """Return the best plan that fits of each set of methods on all ranks, best first, then one rank alone,
    last, since new ranks start for it. shard_weights, which saves memory and no time, is tried where the
    same methods do not fit without it. ``exact``: of those whose result is one rank's."""
    fitting = sorted((each for each in question.options(exact) if each.fits), key=attrgetter("score"))
    whole = {each.mechanisms for each in fitting}
    best: dict[frozenset, Option] = {}
    for option in fitting:
        saves_nothing = option.plan.shard_weights and option.mechanisms - {"shard_weights"} in whole
        if option.plan.world_size == question.gpus > 1 and not saves_nothing:
            best.setdefault(option.mechanisms, option)
    alone = [each for each in fitting if each.plan.world_size == 1]
    return [*list(best.values())[:MAX_CANDIDATES], *alone[:1]]


def inputs_of(auto: AutoConfig, plan: ParallelConfig, question: Question, devices: list[int]) -> dict:
    """Return the inputs of Parallel Config that make ``plan`` by hand. One rank names none of GPUs that are
    alike: auto would read the number as how many, should it be chosen again."""
    any_of_all = plan.world_size == 1 and not question.machine.differs and not auto.gpus.strip()
    gpus = "" if any_of_all else planning.placed(auto, plan, question, devices).gpus
    planned = {name: getattr(plan, name) for name in (*PLANNED, "shares", "compile")}
    return {"method": MANUAL, "gpus": gpus, **planned}


def _is_sampler(graph: dict, key: str) -> bool:
    kind = graph.get(key, {}).get("class_type", "")
    return kind.startswith("ParallelSampler") and loader_of(graph, key) is not None


def _config_of(graph: dict, node: str | None) -> ParallelConfig | AutoConfig:
    """Return what the graph's Parallel Config says. ConfigError where a link hides some of it: trials would
    go without it, and the best of them would be written over it."""
    linked = [name for name in graph.get(node or "", {}).get("inputs", {}) if source(graph, node or "", name)]
    if linked:
        raise ConfigError(
            f"{', '.join(linked)} of Parallel Config {'is' if len(linked) == 1 else 'are'} linked, so the "
            f"value is known only when the graph runs; type it in and try again."
        )
    return config_in(graph, node) or AutoConfig()


def _auto(config: ParallelConfig | AutoConfig) -> AutoConfig:
    """Return auto on the GPUs of a config whose degrees are set, keeping its shares; on all for one rank.
    ConfigError for ranks of somebody else."""
    if isinstance(config, AutoConfig):
        return config
    if config.address:
        raise ConfigError(
            f"address is {config.address!r:.100}: the degrees of a backend that somebody else has started "
            f"are fixed, so there is nothing to try; clear address."
        )
    on_gpus = config.resolve_device(torch.cuda.device_count()) == "cuda"
    is_open = on_gpus and not config.shares  # shares are of as many as there are degrees for
    if is_open:  # the number of the one GPU that a trial was fastest on would be read as how many
        gpus = config.gpus if config.world_size > 1 else ""
    else:
        gpus = config.gpus or str(config.world_size)
    opened = {name: getattr(ParallelConfig, name) for name in (*PLANNED, "shares")}
    return AutoConfig(gpus=gpus, base=replace(config, gpus="", **opened), shares=config.shares)


def _question(
    graph: dict, loader: str, auto: AutoConfig, check: Callable[[], None]
) -> tuple[Question, list[int]]:
    inputs = values(graph, loader)
    choice = model_choice_of(inputs)
    if choice is None:
        raise ConfigError(
            f"model_name is {inputs.get('model_name')!r:.200}, which is not in a models folder; refresh "
            f"the page and choose it again."
        )
    pool.allow(*model_folders())
    return question_for_page(auto, choice, partial(request_of_graph, graph, loader), check)


def _prompts(graph: dict, sampler: str, loader: str, config: str, inputs: dict) -> list[dict]:
    """Return the ``graph``, which ends at ``sampler``, with these inputs, twice with two seeds where it has
    one: the first run of new process groups is slower. New seeds: ComfyUI caches runs of earlier ones."""
    trial = copy.deepcopy(graph)
    node = trial.setdefault(config, {"class_type": "ParallelConfig", "inputs": {}})
    node["inputs"] |= inputs
    trial[loader]["inputs"]["config"] = [config, 0]
    trial[f"{CONFIG}-end"] = {"class_type": "PreviewAny", "inputs": {"source": [sampler, 0]}}
    seeded = next(_seeds(trial, sampler), None)
    if seeded is None:
        return [trial]
    key, name = seeded
    again = copy.deepcopy(trial)
    seed = random.randrange(SEED_COUNT)
    trial[key]["inputs"][name], again[key]["inputs"][name] = seed, seed + 1
    return [trial, again]


def _seeds(graph: dict, sampler: str):
    """Yield node and input of the seeds of a sampler or of its noise."""
    for key in filter(None, (sampler, source(graph, sampler, "noise"))):
        for name, value in values(graph, key).items():
            if name in SEEDS and isinstance(value, int):
                yield key, name
