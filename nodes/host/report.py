"""The lines under the nodes: what each rank holds, what a request would take, and how a run went."""

from collections.abc import Mapping, Sequence

from ...backend.config import ParallelConfig
from ...backend.planner.rank_shares import rank_shares
from ...backend.protocol import Described
from ...backend.quantization.lora_bytes import LoraBytes
from ...backend.units import blocks_text, gigabytes_or_megabytes

#: Key of the text in what a node shows (web/report.js reads it).
UI_KEY = "parallel_dit"


def shown(lines: Sequence[str]) -> dict:
    """Return what a node hands to the page to keep ``lines`` under it."""
    return {UI_KEY: ["\n".join(lines)]}


def rank_lines(ranks: Sequence[dict], gpus: Sequence[int], memory: Sequence[int]) -> list[str]:
    """Return a line for each rank: its device, its weights, its blocks. ``ranks``: LoadReports as
    dictionaries. ``gpus``: number of each rank's GPU; ``memory``: bytes of each; both empty where ranks have
    none, or are elsewhere."""
    lines = []
    for index, rank in enumerate(ranks):
        name = f"GPU {gpus[index]}" if gpus else f"rank {rank['rank']}"
        held = rank["weight_bytes"]
        weights = gigabytes_or_megabytes(held)
        if memory:  # a card of "24 GB" has 24 GiB
            weights = f"{held / 2**30:.1f} of {memory[index] / 2**30:.0f} GiB"
        lines.append(f"{name} · {weights} · {blocks_text(rank['blocks'])}")
    return lines


def quantized_lines(quantized: Sequence[dict]) -> list[str]:
    """Return a line for each format of quantized layers and way to multiply, with the reasons for it."""
    kinds: dict[tuple[str, str], dict[str, int]] = {}
    for kind in quantized:
        way, _, why = kind["multiplication"].partition(": ")
        kinds.setdefault((kind["format"], way), {})[why] = kind["layers"]
    lines = []
    for (format, way), reasons in kinds.items():
        told = [why if len(reasons) == 1 else f"{why} ({count})" for why, count in reasons.items()]
        lines.append(f"{sum(reasons.values())} {format} layers, {way}{': ' * any(reasons)}{', '.join(told)}")
    return lines


def lora_line(before: Mapping, after: Mapping, config: ParallelConfig) -> str:
    """Return the note on the last LoRA of a model, and how much it takes on a rank next to quantized weights.
    Of weights that are not quantized it changes the values alone. ``before``, ``after``: Loaded.info without
    that LoRA and with it. A stage is taken to have as much of it as of the weights."""
    note = after["notes"][-1]
    counts = zip(after["lora_bytes"], before["lora_bytes"])
    more = LoraBytes(*(max(0, all_of_them - others) for all_of_them, others in counts))
    if not more.total:
        return note
    weights = {rank["stage"]: rank["weight_bytes"] for rank in after["ranks"]}
    of_stage = {stage: size / max(1, sum(weights.values())) for stage, size in weights.items()}
    ranks = zip(after["ranks"], rank_shares(config, 1))
    tp = config.tensor_parallel_degree
    sizes = [more.on_rank(share.matrices / tp) * of_stage[rank["stage"]] for rank, share in ranks]
    most = gigabytes_or_megabytes(max(sizes))
    bound = "" if most == gigabytes_or_megabytes(min(sizes)) else "at most "
    unit = "GPU" if after["device"] == "cuda" else "rank"
    return f"{note} · {bound}+{most} on each {unit}"


def plan_line(config: ParallelConfig, what: str, described: Described) -> str:
    """Return one line: what a request (``what``) adds to the weights, and sends in a step."""
    ranks = described.ranks
    more = max(rank["device_bytes"] - rank["weight_bytes"] for rank in ranks)
    sent = max(sum(rank["bytes_per_step"].values()) for rank in ranks)
    sends = f"sends {gigabytes_or_megabytes(sent)} a step" if sent else "sends nothing"
    packed = " (wire fp8: not exact)" if config.wire == "fp8" else ""
    parts = [f"about {gigabytes_or_megabytes(more)} more", sends + packed]
    host = max(rank["host_bytes"] for rank in ranks)
    if host:
        parts.append(f"{gigabytes_or_megabytes(host)} of weights in host memory")
    if config.rank_shares:
        parts += _shared(ranks)
    if config.pipefusion_degree > 1:
        patches = f"{config.patches} patch{'es' * (config.patches > 1)}"
        parts.append(f"{patches} ({config.stale_kv})" if config.patches > 1 else patches)
    return f"{what}: {' · '.join(parts)}"


def _shared(ranks: Sequence[dict]) -> list[str]:
    """Count what each rank has of what ranks have different amounts of."""
    counts = {
        "tokens": [sum(map(sum, rank["patches"])) for rank in ranks],
        "heads": [rank["heads"] for rank in ranks],
        "blocks": [rank["blocks"][1] - rank["blocks"][0] for rank in ranks],
        "samples": [rank["samples"] for rank in ranks],
    }
    uneven = {name: each for name, each in counts.items() if len(set(each)) > 1}
    return [f"{name} {' / '.join(map(str, each))}" for name, each in uneven.items()]


def pace(each: float) -> str:
    """Write the seconds of a step, or steps of a second."""
    return f"{each:.2f} s/step" if each >= 1 else f"{1 / each:.1f} steps/s"


def run_lines(
    config: ParallelConfig,
    steps: int,
    seconds: float,
    device: str,
    one_rank: float | None,
    projected: float | None = None,
    is_auto: bool = False,
) -> list[str]:
    """Return how a run went. ``one_rank``: seconds a step of the same request on one rank, as it was measured
    here; None where it never was. ``projected``: how many times as fast as one rank the planner expects.
    ``is_auto``: the degrees are the planner's."""
    each = seconds / steps
    ranks = config.world_size
    unit = "GPU" if device == "cuda" else "rank"
    count = f"{ranks} {unit}{'s' * (ranks > 1)}"
    parts = [f"{steps} step{'s' * (steps > 1)} in {seconds:.1f} s", pace(each), count]
    if one_rank and ranks > 1:
        parts.append(f"{one_rank / each:.1f}x one {unit}")
    elif projected and ranks > 1:
        parts.append(f"about {projected:.1f}x one {unit} (projected)")
    times = one_rank / each if one_rank else projected
    advice = idle_pipeline(config, steps)
    if ranks > 1 and times and round(times, 1) < 1 and not advice:
        inputs = "gpus to 1" if is_auto else "the degrees to 1"
        fitting = "" if one_rank else ", if the model fits there"
        advice = [f"Slower than one {unit} here: set {inputs}{fitting}, or make larger images or videos."]
    return [" · ".join(parts), *advice]


def idle_pipeline(config: ParallelConfig, steps: int) -> list[str]:
    """Return a sentence where every step of a run was one of the warm-up, so that no patch was pipelined."""
    if not config.has_stale_kv or steps > config.warmup_steps:
        return []
    return [
        f"PipeFusion had no effect: steps {steps}, all of them warm-up (warmup_steps {config.warmup_steps}); "
        f"take more steps, a smaller warmup_steps, or ulysses_degree."
    ]
