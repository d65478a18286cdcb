"""The bytes that a rank sends in one step of the steady state, by mechanism (see parallel/)."""

import math
from collections import Counter
from dataclasses import replace

from ..parallel.block_cost import AttentionCall
from ..parallel.block_streams import BlockStructure
from ..parallel.sequence import Span, TokenShards
from ..parallel.wire_bytes import head_bytes
from .workload import MeshPlace, Workload


def sent(work: Workload, place: MeshPlace, patches: list[TokenShards]) -> Counter[str]:
    """Count the bytes that the rank at ``place`` sends in one step, by mechanism (comm.SENT)."""
    sizes: Counter[str] = Counter()
    blocks = work.blocks(place)
    prompts = work.prompts_per_rank * work.dtype.itemsize
    for patch in patches:
        # in the steady state static text is cached
        now = replace(patch, text=Span(0, 0)) if work.family.cache.static_text else patch
        if work.is_linear:
            sizes += _mixing(work, place, len(blocks), now)
        else:
            sizes += _attention(work, place, blocks, now, patch)
        if place["pp"] < work.config.pipefusion_degree - 1:
            sizes["pipeline"] += prompts * work.batch * work.width * _carried(work, blocks.stop, now)
        sizes += _outputs(work, place, len(now.local.image), len(now.image))
    sizes["tensor"] = _tensor_parallel(work, place, patches) * prompts
    hosted = work.stages.hosted(place["pp"])
    sizes["modulation"] = sum(work.features(name, place) for name in hosted) * prompts
    return sizes


def _carried(work: Workload, boundary: int, patch: TokenShards) -> int:
    """Count the tokens that go on to the next stage: with text once that has entered, and long skips."""
    structure = BlockStructure.of(work.checkpoint.transformer, work.family)
    skips = len(structure.crossing(boundary)) * patch.local.stream
    own = patch.local.stream if boundary <= structure.entry else len(patch.local)
    return own + skips


def _attention(
    work: Workload, place: MeshPlace, blocks: range, now: TokenShards, patch: TokenShards
) -> Counter[str]:
    """Count the all-to-all of Ulysses, and all keys and values of the patch that travel around the ring."""
    sizes: Counter[str] = Counter()
    for call, count in work.communicated_calls(blocks).items():
        row = head_bytes(work.call_head_size(call), work.dtype.itemsize, work.config.wire)
        head = count * work.batch * work.prompts_per_rank * row
        ulysses, ring = _call(work, place, call, now, patch)
        sizes += Counter(ulysses=head * ulysses, ring=head * ring)
    return sizes


def _call(
    work: Workload, place: MeshPlace, call: AttentionCall, now: TokenShards, patch: TokenShards
) -> tuple[int, int]:
    """Count the heads of tokens that one attention call sends, in Ulysses and around the ring."""
    u = work.config.ulysses_degree
    r = work.config.ring_degree
    heads = work.heads(place)
    others = work.all_heads(place) - heads
    kv_heads = work.kv_heads(place, call)
    other_kv = work.all_kv_heads(place, call) - kv_heads

    def groups(lengths: list[int]) -> list[int]:
        return [sum(lengths[i * u : (i + 1) * u]) for i in range(r)]

    queries = now.lengths(call.queries)
    keys = now.lengths(call.keys)
    own = queries[now.sp_rank]
    ulysses = others * own + 2 * other_kv * keys[now.sp_rank]
    ulysses += heads * (groups(queries)[place["ring"]] - own)
    travelling = groups(patch.lengths(call.keys))
    passed = sum(travelling[(place["ring"] - hop) % r] for hop in range(r - 1))
    if work.config.has_stale_kv:
        passed = groups(keys)[place["ring"]] * (r - 1)
    return ulysses, 2 * kv_heads * passed


def _mixing(work: Workload, place: MeshPlace, blocks: int, patch: TokenShards) -> Counter[str]:
    """Count what token_mixing.py sends for one patch of a square image."""
    ranks = patch.sp_size
    calls = blocks * work.batch * work.prompts_per_rank
    tokens = len(patch.local.image)
    others = ranks - 1
    line = math.isqrt(work.request.image_tokens) + 1
    if line < tokens and not work.config.has_stale_kv:
        tokens = line
        others = (patch.sp_rank > 0) + (patch.sp_rank < ranks - 1)
    state = calls * 2 * (ranks - 1) * work.state_bytes(place) // ranks
    halo = calls * others * tokens * work.width * work.dtype.itemsize
    return Counter({"linear-attention state": state, "halo": halo})


def _outputs(work: Workload, place: MeshPlace, own: int, tokens: int) -> Counter[str]:
    """Count model outputs (float32): to the first stage, gathered over SP there, then between CFG ranks."""
    config = work.config
    latent = work.family.latent
    channels = latent.channels(work.checkpoint.config)
    patch = latent.patch(work.checkpoint.config)
    features = 4 * work.batch * work.prompts_per_rank * channels * math.prod(patch)
    sizes: Counter[str] = Counter()
    if config.pipefusion_degree > 1 and place["pp"] == config.pipefusion_degree - 1:
        sizes["outputs"] += own * features
    if place["pp"] == 0:
        sizes["outputs"] += own * features * (config.sp_degree - 1)
        sizes["cfg"] += tokens * features * (config.cfg_degree - 1)
    return sizes


def _tensor_parallel(work: Workload, place: MeshPlace, patches: list[TokenShards]) -> int:
    """Count the numbers that tensor parallelism sends for one prompt and its samples."""
    image = sum(patch.local.stream for patch in patches)
    names = dict(work.sequence.latents)
    latents = {name: sum(patch.lengths(name)[patch.sp_rank] for patch in patches) for name in names}
    text = work.request.text_tokens * len(patches)  # every rank and patch reads the whole prompt
    if work.family.blocks.text_position:
        text = sum(len(patch.local.text) for patch in patches)
    total = 0
    for module, cut in work.cuts(place).items():
        block = work.checkpoint.layer_blocks[module]
        if not work.is_on(module, block, place["pp"]):
            continue
        tokens = 1.0  # modulation has one embedding
        if module not in work.modulation:
            passing = work.checkpoint.layer_tokens[module]
            inner = module.removeprefix(f"{work.checkpoint.block_names[block]}.")
            # of experts, the chosen ones
            share = work.family.blocks.flop_share(inner, work.checkpoint.config)
            tokens = work.batch * work.runs(passing) * passing.count(image, text, latents) * share
        if cut.reduce:
            total += round(2 * (cut.reduce.size - 1) * tokens * cut.reduced_features / cut.reduce.size)
        if cut.gather:
            total += round((cut.gather.size - 1) * tokens * sum(map(len, cut.outputs)))
    return total
