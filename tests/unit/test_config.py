"""Every ParallelConfig that cannot run is refused in one sentence with its values and a remedy."""

from dataclasses import fields

import pytest

from backend.config import AXES, PER_REQUEST, ConfigError, ParallelConfig
from backend.planner.auto_config import config_of
from backend.protocol import Sample
from backend.rank import start

REFUSED = {
    "degree 0": (dict(ulysses_degree=0), "at least 1"),
    "cfg 3": (dict(cfg_degree=3), "two branches"),
    "no warm-up": (dict(pipefusion_degree=2, warmup_steps=0), "at least one synchronous step"),
    "patches without stages": (dict(num_pipeline_patch=4), "pipefusion_degree is 1"),
    "negative patches": (dict(pipefusion_degree=2, num_pipeline_patch=-1), "positive number"),
    "negative warm-up": (dict(warmup_steps=-1), "warmup_steps is -1; use 0 or a positive number"),
    "attention": (dict(attention="xformers"), "flash-attn"),
    "device": (dict(device="tpu"), "cpu"),
    "type": (dict(ulysses_degree="2"), "write it as int"),
    "gpus text": (dict(gpus="a,b"), "not a list"),
    "gpus twice": (dict(ulysses_degree=2, gpus="1,1"), "named once"),
    "gpus count": (dict(ulysses_degree=4, gpus="0,1"), "names 2 devices"),
    "shares count": (dict(ulysses_degree=2, shares="3,2,1"), "3 numbers, but ulysses_degree 2 = 2 ranks"),
    "shares of one": (dict(shares="60,40"), "2 numbers, but every degree 1"),
    "share 0": (dict(ulysses_degree=2, shares="1,0"), "not a list of positive numbers"),
    "share below 0": (dict(ulysses_degree=2, shares="60,-40"), "not a list of positive numbers"),
    "share nan": (dict(ulysses_degree=2, shares="nan,1"), "not a list of positive numbers"),
    "share inf": (dict(ulysses_degree=2, shares="inf,1"), "not a list of positive numbers"),
    "shares text": (dict(ulysses_degree=2, shares="fast,slow"), "not a list of positive numbers"),
    "shares with gaps": (dict(ulysses_degree=2, shares="60,,40"), "not a list of positive numbers"),
    "gpus on cpu": (dict(gpus="0", device="cpu"), "clear gpus"),
    "shards of stages": (
        dict(shard_weights=True, ulysses_degree=2, pipefusion_degree=2),
        "pipefusion_degree is 2, which divides the weights already",
    ),
    "shards of shards": (
        dict(shard_weights=True, ulysses_degree=2, tensor_parallel_degree=2),
        "tensor_parallel_degree is 2, which divides the weights already",
    ),
    "shards for nobody": (dict(shard_weights=True, cfg_degree=2), "but those degrees are 1; raise one"),
    "shards in host memory": (
        dict(shard_weights=True, ring_degree=2, offload_modulation=True),
        "sharded weights stay on the device",
    ),
}


@pytest.mark.parametrize("fields, says", REFUSED.values(), ids=REFUSED)
def test_refused(fields, says):
    with pytest.raises(ConfigError, match=says) as error:
        ParallelConfig(**fields).validate()
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


@pytest.mark.parametrize("degree", ["ulysses_degree", "ring_degree", "data_parallel_degree"])
def test_weights_are_sharded_over_ranks_that_hold_the_same(degree):
    ParallelConfig(shard_weights=True, **{degree: 2}).validate()


def of(**degrees):
    return ParallelConfig(**{AXES.get(key, key): value for key, value in degrees.items()})


@pytest.mark.parametrize(
    "one, other, same",
    [
        (of(cfg=2), of(ulysses=2), True),
        (of(dp=4), of(ring=2, ulysses=2), True),
        (of(ulysses=2, tp=2), of(cfg=2, tp=2), True),
        (of(ulysses=2, shares="60,40"), of(ulysses=2), True),
        (of(tp=2, shares="60,40"), of(tp=2), False),
        (of(pp=2, shares="60,40"), of(pp=2, shares="40,60"), False),
        (of(cfg=2, pp=2), of(dp=2, pp=2), True),
        (of(pp=2, ring=2), of(pp=2, ulysses=2), True),
        (of(pp=2), of(pp=2, num_pipeline_patch=4), True),
        (of(cfg=2, shard_weights=True, ulysses=2), of(cfg=2, shard_weights=True, ulysses=2), True),
        (of(cfg=2, pp=2), of(ulysses=2, pp=2), False),
        (of(ulysses=2), of(pp=2), False),
        (of(ulysses=2), of(tp=2), False),
        (of(tp=4), of(tp=4, split_scheme="2d"), False),
        (of(pp=2), of(pp=2, attn_layer_num_for_pp="1,3"), False),
        (of(dp=2), of(dp=2, shard_weights=True), False),
        (of(dp=2, shard_weights=True), of(ulysses=2, shard_weights=True), False),
        (of(cfg=2), of(cfg=2, offload_modulation=True), False),
        (of(cfg=2), of(cfg=2, ulysses=2), False),
    ],
)
def test_changes_of_degrees_that_leave_every_rank_its_weights(one, other, same):
    assert one.same_weights(other) == other.same_weights(one) == same


def test_ranks_stay_while_they_are_as_many_on_the_same_devices():
    assert of(cfg=2).same_ranks(of(ulysses=2)) and of(cfg=2, gpus="0,1").same_ranks(of(tp=2))
    assert not any(
        of(cfg=2).same_ranks(other)
        for other in (
            of(cfg=2, ulysses=2),
            of(ulysses=2, device="cpu"),
            of(ulysses=2, gpus="0,2"),
            of(ulysses=2, address="unix:/x"),
        )
    )


def test_more_ranks_than_gpus_names_the_product():
    config = ParallelConfig(cfg_degree=2, ulysses_degree=4, device="cuda")
    with pytest.raises(ConfigError, match="cfg_degree 2 x ulysses_degree 4 = 8 ranks, but .* has 4 GPUs"):
        config.resolve_device(4)
    with pytest.raises(ConfigError, match="gpus is '0,5', but this machine has 2 GPUs"):
        of(ulysses=2, gpus="0,5").resolve_device(2)


@pytest.mark.parametrize("gpus, here, to", [("2", 2, "gpus to a number below 2"), ("1", 1, "gpus to 0")])
def test_the_number_of_the_one_gpu_is_told_from_how_many(gpus, here, to):
    """No degree can be lowered where every one is 1."""
    with pytest.raises(
        ConfigError, match=f"manual and every degree is 1.* set method to auto.* {to}"
    ) as failure:
        config_of(here, method="manual", gpus=gpus)
    assert "lower" not in str(failure.value)
    assert config_of(here + 2, method="manual", gpus=gpus).gpu_indices == [int(gpus)]
    assert ParallelConfig().product == "every degree 1 = 1 rank"


def test_cuda_without_gpu():
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        ParallelConfig(device="cuda").resolve_device(0)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_windows_is_refused_by_name(monkeypatch, device):
    """Also the CPU there: ranks end with ComfyUI by a pipe, which Windows does not poll."""
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ConfigError, match="Windows, where torch has no NCCL .*WSL2"):
        ParallelConfig(device=device).resolve_device(2)


def test_a_torch_without_nccl_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="built without NCCL.*pytorch.org"):
        start._device(ParallelConfig(ulysses_degree=2))
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert start._device(ParallelConfig(ulysses_degree=2)) == "cuda"


def test_auto_takes_gpus_where_there_are_any():
    assert ParallelConfig().resolve_device(1) == "cuda"
    assert ParallelConfig().resolve_device(0) == "cpu"


def test_settings_of_a_request_keep_the_backend():
    one, other = (
        ParallelConfig(pipefusion_degree=2),
        ParallelConfig(pipefusion_degree=2, warmup_steps=3, num_pipeline_patch=8, attention="sdpa"),
    )
    assert one.topology() == other.topology() != ParallelConfig(ulysses_degree=2).topology()


def test_batch_smaller_than_the_replicas():
    with pytest.raises(ConfigError, match="batch is 1"):
        ParallelConfig(data_parallel_degree=2).check_batch(1)
    ParallelConfig(data_parallel_degree=2).check_batch(3)


def test_other_schemes_are_refused():
    for scheme in ("2.5d", "3d"):
        with pytest.raises(ConfigError, match=f"split_scheme is '{scheme}'; choose one of megatron"):
            ParallelConfig(tensor_parallel_degree=8, split_scheme=scheme).validate()


def test_what_travels_with_a_request_is_of_its_message():
    both = {each.name for each in fields(Sample)} & {each.name for each in fields(ParallelConfig)}
    assert both == set(PER_REQUEST) == set(ParallelConfig().per_request)
    other = ParallelConfig(
        warmup_steps=3, attention="sdpa", compile="blocks", stale_kv="extrapolate", wire="fp8"
    )
    assert other.topology() == ParallelConfig().topology()


@pytest.mark.parametrize(
    "gpus, here, says",
    [
        ("2", 1, "gpus is '2', but this machine has 1 GPU (numbered from 0); lower it"),
        ("0,5", 2, "gpus is '0,5', but this machine has 2 GPUs (numbered from 0); name others"),
        ("20", 0, "gpus is '20', but on the CPU this machine runs at most 16 processes; lower gpus."),
    ],
)
def test_more_gpus_than_there_are_name_the_input_that_was_set(gpus, here, says):
    """Not a degree, which auto chooses."""
    with pytest.raises(ConfigError) as failure:
        config_of(here, gpus=gpus)
    assert says in str(failure.value) and "degree" not in str(failure.value)
