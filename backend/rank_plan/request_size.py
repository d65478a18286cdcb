"""How large a request is, counted from its message: what its memory follows from."""

from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..models.family import Family
from ..parallel.stage_split import IMAGE_TOKENS, TEXT_TOKENS
from ..planner.machine import samples_at_once
from ..protocol import Describe, ModelCall, Sample
from ..sampling.guidance import branch_of
from ..sampling.model_inputs import ModelInputs, inputs_of


@dataclass(frozen=True)
class RequestSize:
    """A request as rank_plan counts it; by default Flux at 1024 x 1024 with a negative prompt.

    image_tokens: of the latent and of references. text_tokens: of the longest prompt. batch, prompts: of all
    replicas and both CFG branches. calls: of the model with each prompt. latents: name and tokens of nested
    ones, as they follow each other; all tokens are the first's without them. controls, image_features: of the
    prompt with most of them, as Conditioning counts them; None for as many features as is usual. drained: a
    call of its own, as under Parallel Model.
    """

    image_tokens: int = IMAGE_TOKENS
    text_tokens: int = TEXT_TOKENS
    batch: int = 1
    prompts: int = 2
    calls: int = 28
    latents: tuple[tuple[str, int], ...] = ()
    controls: int = 1
    image_features: int | None = None
    drained: bool = False

    @property
    def tokens(self) -> int:
        """Count the image and text tokens of a sample."""
        return self.image_tokens + self.text_tokens


def size_of(
    message: Sample | ModelCall,
    config: ParallelConfig,
    checkpoint: Checkpoint,
    inputs: ModelInputs | None = None,
) -> RequestSize:
    """Return the size of a checked request, of a call with all its tensors. ``inputs``: if they are known."""
    inputs = inputs or inputs_of(message, checkpoint)
    grid = inputs.grid
    prompts = inputs.prompts.values()
    family = checkpoint.family
    conditioning = family.conditioning
    tokens = grid.tokens + max(conditioning.context_tokens(checkpoint.config, grid, each) for each in prompts)
    batch = inputs.batch
    count = len(prompts)
    calls = 1
    if isinstance(message, Sample):
        calls = len(message.tensors["sigmas"]) - 1
        if config.cfg_degree > 1:  # as many as the branch with most of them has, for each
            count = config.cfg_degree * max(Counter(map(branch_of, inputs.prompts)).values())
    else:  # its samples know of no CFG branches; of those before them nothing stays cached
        batch = _samples_of_calls(batch, tokens, config)
        count = config.cfg_degree  # one on each CFG rank
    return RequestSize(
        image_tokens=tokens,
        text_tokens=max(_text_tokens(family, each) for each in prompts),
        batch=batch,
        prompts=count,
        calls=calls,
        latents=family.latent.named(grid),
        controls=max(map(conditioning.controls, prompts)),
        image_features=max(conditioning.image_features(checkpoint.config, each) for each in prompts),
        drained=isinstance(message, ModelCall),
    )


def described_size(message: Describe, tokens: int, config: ParallelConfig) -> RequestSize:
    """Return the size of a request of so many image ``tokens``, or of its calls, that is to be described."""
    size = RequestSize(tokens, message.text_tokens, message.batch, message.prompts)
    if not message.drained:
        return size
    batch = _samples_of_calls(message.batch * message.prompts, tokens, config)
    return replace(size, batch=batch, prompts=config.cfg_degree, calls=1, drained=True)


def _samples_of_calls(batch: int, tokens: int, config: ParallelConfig) -> int:
    """Return the samples, of all data-parallel replicas, that a call of the model computes at once."""
    replicas = config.data_parallel_degree * config.cfg_degree
    return min(-(-batch // replicas), samples_at_once(tokens)) * config.data_parallel_degree


def _text_tokens(family: Family, given: dict[str, Tensor]) -> int:
    """Count the tokens of a prompt that blocks read, in the image's sequence or next to it."""
    if family.blocks.text_position:
        return family.conditioning.count_text_tokens(given)
    text = given.get("c_crossattn")
    return text.shape[1] if text is not None and text.ndim == 3 else 0
