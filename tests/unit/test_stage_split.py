"""Pipeline stages: balanced by work, never empty."""

from itertools import combinations
from types import SimpleNamespace

import diffusers
import pytest
from accelerate import init_empty_weights

from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.checkpoint import Checkpoint
from backend.models import FAMILIES
from backend.parallel.stage_split import MAX_WEIGHTS, explicit_blocks, plan, stage_blocks
from backend.sampling.validation import check_blocks_and_heads


@pytest.mark.parametrize("blocks, stages", [(57, 8), (6, 4), (5, 5), (12, 1), (10, 7)])
def test_equal_blocks(blocks, stages):
    sizes = [len(stage) for stage in stage_blocks([1.0] * blocks, stages)]
    assert sum(sizes) == blocks and min(sizes) >= 1 and max(sizes) == -(-blocks // stages)


def test_dear_blocks_get_room():
    stages = stage_blocks([3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    assert [list(stage) for stage in stages] == [[0, 1], [2, 3, 4, 5, 6, 7]]


# : Blocks as in Flux: of the same work, the first (double) with twice the matrices and four times the
# modulation of the others.
DOUBLE, SINGLE = 19, 38
COSTS, WEIGHTS = [1.0] * (DOUBLE + SINGLE), [24] * DOUBLE + [12] * SINGLE
MODULATION = [{f"double.{i}.image": 6, f"double.{i}.text": 6} for i in range(DOUBLE)] + [
    {f"single.{i}": 3} for i in range(SINGLE)
]


def weights_of(stages):
    held = [sum(WEIGHTS[i] for i in blocks) for blocks in stages.blocks]
    for name, holder in stages.holders.items():
        held[holder] += {name: size for layers in MODULATION for name, size in layers.items()}[name]
    return held


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_modulation_balances_weights_at_no_cost_in_work(count):
    stages = plan(COSTS, WEIGHTS, MODULATION, count)
    assert stages.blocks == stage_blocks(COSTS, count)
    held = weights_of(stages)
    assert sum(held) == sum(WEIGHTS) + sum(sum(layers.values()) for layers in MODULATION)
    assert max(held) <= 1.1 * sum(held) / count
    assert all(
        stages.owners[name] == next(i for i, own in enumerate(stages.blocks) if block in own)
        for block, layers in enumerate(MODULATION)
        for name in layers
    )


def test_stages_that_are_balanced_keep_their_modulation():
    stages = plan([1.0] * 8, [24] * 8, MODULATION[:8], 4)
    assert stages.holders == stages.owners and not any(stages.hosted(i) for i in range(4))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_without_modulation_work_gives_way_to_weights(count):
    """Chroma: the cheapest split of which no stage has more than MAX_WEIGHTS x the mean."""
    stages = plan(COSTS, WEIGHTS, [{}] * len(COSTS), count)
    assert (
        max(weights_of_blocks := [sum(WEIGHTS[i] for i in own) for own in stages.blocks])
        <= MAX_WEIGHTS * sum(weights_of_blocks) / count
    )
    assert max(map(len, stages.blocks)) > -(-len(COSTS) // count)


def test_a_block_too_heavy_for_the_limit_is_split_by_work():
    assert plan([1.0] * 4, [100, 1, 1, 1], [{}] * 4, 2).blocks == [range(0, 2), range(2, 4)]


def released(family: str, **config) -> Checkpoint:
    """A released size: the tensors of its file are taken to be those of the configuration."""
    cls = getattr(diffusers, FAMILIES[family].transformer)
    with init_empty_weights():
        shapes = {name: tuple(value.shape) for name, value in cls(**config).state_dict().items()}
    files = SimpleNamespace(shapes=shapes)
    return Checkpoint(family, FAMILIES[family].of(config), config, files)


@pytest.fixture(scope="module")
def medium():
    """SD3.5 medium: 24 blocks, the first 13 with a second attention, the last without an MLP for text."""
    return released(
        "sd3",
        sample_size=128,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=24,
        attention_head_dim=64,
        num_attention_heads=24,
        joint_attention_dim=4096,
        caption_projection_dim=1536,
        pooled_projection_dim=2048,
        pos_embed_max_size=16,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    )


def dearest(costs, blocks) -> float:
    """The dearest stage as a multiple of the mean."""
    return max(sum(costs[i] for i in stage) for stage in blocks) * len(blocks) / sum(costs)


@pytest.mark.parametrize("count, most, by_number", [(2, 1.03, 1.17), (3, 1.05, 1.15), (4, 1.07, 1.17)])
def test_blocks_with_a_second_attention_are_dearer(medium, count, most, by_number):
    """Four stages of 24 blocks cannot be closer: none of the 1771 splits is."""
    costs, stages = medium.block_costs, medium.stages(ParallelConfig(pipefusion_degree=count))
    assert [round(cost / costs[13], 2) for cost in (costs[0], costs[12], costs[22], costs[23])] == [
        1.46,
        1.46,
        1.0,
        0.94,
    ]
    every = [
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, 24))]
        for cuts in combinations(range(1, 24), count - 1)
    ]
    assert dearest(costs, stages.blocks) == min(dearest(costs, blocks) for blocks in every) <= most
    assert dearest(costs, stage_blocks([1.0] * 24, count)) > by_number


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_double_and_single_blocks_of_flux_cost_the_same(count):
    flux = released(
        "flux",
        patch_size=1,
        in_channels=64,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        attention_head_dim=128,
        num_attention_heads=24,
        joint_attention_dim=4096,
        pooled_projection_dim=768,
        guidance_embeds=True,
    )
    costs, stages = flux.block_costs, flux.stages(ParallelConfig(pipefusion_degree=count))
    assert max(costs) <= 1.001 * min(costs) and stages.blocks == stage_blocks([1.0] * len(costs), count)


def test_listed_counts_stay():
    assert plan(COSTS, WEIGHTS, MODULATION, 2, [5, 52]).blocks == [range(0, 5), range(5, 57)]


def test_explicit_counts_are_prefix_sums():
    assert explicit_blocks([12, 15, 15, 15]) == [range(0, 12), range(12, 27), range(27, 42), range(42, 57)]


@pytest.mark.parametrize(
    "text, says", [("3,x", "not a list"), ("3,9,1", "that many stages"), ("0,12", "at least one block")]
)
def test_bad_lists(text, says):
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(pipefusion_degree=2, attn_layer_num_for_pp=text).validate()


def test_list_that_does_not_add_up():
    with pytest.raises(UnsupportedError, match="together 11 blocks, but tiny has 12"):
        check_blocks_and_heads(
            "tiny", 12, 8, ParallelConfig(pipefusion_degree=2, attn_layer_num_for_pp="5,6")
        )


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(pipefusion_degree=13), "has 12 blocks"),
        (dict(ulysses_degree=9), "9 but tiny has 8 attention heads"),
        (dict(tensor_parallel_degree=2, split_scheme="row", ulysses_degree=9), "9 but tiny has 8 attention"),
        (dict(tensor_parallel_degree=3), "does not divide the 8"),
        (dict(tensor_parallel_degree=4, ulysses_degree=4), "rank of tiny has 2 attention heads"),
    ],
)
def test_degrees_that_do_not_fit_the_model(fields, says):
    with pytest.raises(UnsupportedError, match=says):
        check_blocks_and_heads("tiny", 12, 8, ParallelConfig(**fields))
