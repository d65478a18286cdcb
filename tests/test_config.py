"""Every ParallelConfig that cannot run is refused in one sentence with its values and a remedy."""

import pytest
from backend.config import ConfigError, ParallelConfig

REFUSED = {
    "degree 0": (dict(ulysses_degree=0), "at least 1"),
    "cfg 3": (dict(cfg_degree=3), "two branches"),
    "no warm-up": (dict(pipefusion_degree=2, warmup_steps=0), "at least one synchronous step"),
    "patches without stages": (dict(num_pipeline_patch=4), "pipefusion_degree is 1"),
    "negative patches": (dict(pipefusion_degree=2, num_pipeline_patch=-1), "positive number"),
    "attention": (dict(attention="xformers"), "flash-attn"),
    "device": (dict(device="tpu"), "cpu"),
    "type": (dict(ulysses_degree="2"), "not of type int"),
    "gpus text": (dict(gpus="a,b"), "not a list"),
    "gpus twice": (dict(ulysses_degree=2, gpus="1,1"), "named once"),
    "gpus count": (dict(ulysses_degree=4, gpus="0,1"), "names 2 devices"),
    "gpus on cpu": (dict(gpus="0", device="cpu"), "clear gpus"),
}


@pytest.mark.parametrize("fields, says", REFUSED.values(), ids=REFUSED)
def test_refused(fields, says):
    with pytest.raises(ConfigError, match=says) as error:
        ParallelConfig(**fields).validate()
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_more_ranks_than_gpus_names_the_product():
    config = ParallelConfig(cfg_degree=2, ulysses_degree=4, device="cuda")
    with pytest.raises(ConfigError, match="cfg_degree 2 x ulysses_degree 4 = 8 ranks need GPUs .* has 4"):
        config.resolve_device(4)


def test_cuda_without_gpu():
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        ParallelConfig(device="cuda").resolve_device(0)


def test_auto_takes_gpus_where_there_are_any():
    assert ParallelConfig().resolve_device(1) == "cuda"
    assert ParallelConfig().resolve_device(0) == "cpu"


def test_settings_of_a_request_keep_the_backend():
    one, other = ParallelConfig(pipefusion_degree=2), ParallelConfig(pipefusion_degree=2, warmup_steps=3, num_pipeline_patch=8, attention="sdpa")
    assert one.topology() == other.topology() != ParallelConfig(ulysses_degree=2).topology()


def test_batch_smaller_than_the_replicas():
    with pytest.raises(ConfigError, match="batch is 1"):
        ParallelConfig(data_parallel_degree=2).check_batch(1)
    ParallelConfig(data_parallel_degree=2).check_batch(3)
