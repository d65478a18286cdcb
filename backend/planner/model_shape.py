"""What the planner knows of a transformer: FLOPs and bytes of each block (read by rank_plan/shape_of.py)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from ..config import ParallelConfig
from ..parallel import stage_split
from ..parallel.wire_bytes import kv_heads_sent

#: Features of queries and keys where attention sends none, as linear attention.
NONE = -1


@dataclass(frozen=True)
class BlockShape:
    """One block: what it multiplies, holds and sends."""

    #: Multiplications of linear layers for one image token, and for one text token.
    image: float
    text: float
    #: Multiplications of attention for a pair of tokens: two of the image, one of each, two of the text.
    image_pairs: float
    cross_pairs: float
    text_pairs: float
    #: Bytes of weights as stored, without modulation.
    weights: int
    #: Bytes of adaLN layers.
    modulation: int = 0
    #: Numbers of its modulation that are computed from one embedding.
    modulation_width: int = 0
    #: Bytes of the quantized weights once they are dequantized.
    unpacked: int = 0
    #: Bytes read and written to dequantize them, and the kernels that this starts.
    dequantizing: int = 0
    kernels: int = 0
    #: Format of the matrices that multiply natively, and their share of the values of all matrices.
    native_format: str = ""
    native_share: float = 0.0
    #: Share of ``weights`` that tensor parallelism divides.
    cut: float = 1.0
    #: Numbers of one image token, and of one text token, that tensor parallelism sums.
    reduced_image: int = 0
    reduced_text: int = 0
    #: 2 where text and image pass layers of their own.
    streams: int = 1
    #: Features of a token in attention calls whose keys come from all ranks. 0: the model's width; NONE: no
    #: rank sends any.
    queries: int = 0
    keys: int = 0
    #: Long skips that travel on with what the block returns.
    skips: int = 0
    #: Features of a prompt's keys that cross-attention caches for a request; values have as many.
    prompt_keys: int = 0
    #: Activations inside it, as a share of those inside the block that has most.
    activations: float = 1.0

    def sent(self, width: int) -> tuple[int, int]:
        """Return the features of queries and of keys that travel, in a model of that ``width``."""
        return max(0, self.queries or width), max(0, self.keys or width)

    def linear(self, image: int, text: int) -> float:
        """Count the multiplications of linear layers for so many tokens."""
        return self.image * image + self.text * text

    def slowness(self, rates: Mapping[str, float]) -> float:
        """Return the time of linear layers with Machine.native_rates, as a multiple of that without."""
        return 1 - self.native_share + self.native_share / rates.get(self.native_format, 1.0)

    def attention(self, image: int, text: int) -> float:
        """Count the multiplications of attention for so many tokens."""
        return self.image_pairs * image**2 + self.cross_pairs * image * text + self.text_pairs * text**2


@dataclass(frozen=True)
class Activations:
    """Bytes of activations for each token of image and text, of one prompt and sample.

    replicated, cut: inside a block, the latter divided by tensor parallelism. communicated: also inside,
    where sequence parallelism sends tokens around attention; ring: where keys and values go around; both of
    the heads of a rank. whole: next to them, not divided by sequence parallelism. outside: of the model's own
    first and last layers; latents: through both.
    buffered, joined: what is there instead of communicated and ring where keys and values come into
    PipeFusion's buffers; joined are those of all ranks of a ring.
    text_lacks: of latents, what a token of text has none of.
    """

    replicated: float = 0.0
    cut: float = 0.0
    communicated: float = 0.0
    ring: float = 0.0
    outside: float = 0.0
    latents: float = 0.0
    buffered: float = 0.0
    text_lacks: float = 0.0
    whole: float = 0.0
    joined: float = 0.0

    def with_text(self, share: float) -> "Activations":
        """Return those of a request of whose tokens this ``share`` is text."""
        return replace(self, latents=self.latents - share * self.text_lacks, text_lacks=0.0)

    def on_rank(
        self,
        plan: ParallelConfig,
        carried: float = 0.0,
        tokens: float = 1.0,
        matrices: float = 1.0,
        blocks: float = 1.0,
    ) -> float:
        """Return what a rank holds for each token of the whole sequence. carried: bytes of long skips and of
        what came from the stage before; tokens, matrices: multiples of an even part; blocks: the share of its
        largest block (BlockShape.activations)."""
        is_stale = plan.has_stale_kv
        of_matrices = self.cut
        if plan.sp_degree > 1:
            of_matrices += self.buffered if is_stale else self.communicated
        if plan.ring_degree > 1:
            of_matrices += self.joined * plan.ring_degree if is_stale else self.ring
        inside = self.replicated + of_matrices / plan.tensor_parallel_degree * matrices
        held = inside * blocks + carried
        return max(held / plan.sp_degree * tokens + self.whole, self.outside) + self.latents

    def of_samples(self, plan: ParallelConfig, samples: int, token: float) -> float:
        """Return what a rank holds for each token (or for all) of several samples, of which one takes
        ``token``: a pipeline of one patch takes one after the other, and keeps the latents of all."""
        at_once = samples_of_activations(plan, samples)
        return at_once * token + (samples - at_once) * self.latents


def samples_of_activations(plan: ParallelConfig, samples: int) -> int:
    """Return of how many of so many samples a rank has activations at once."""
    return 1 if plan.pipefusion_degree > 1 and plan.patches == 1 else samples


@dataclass(frozen=True)
class ModelShape:
    """A transformer. rest: bytes of weights outside of its blocks. itemsize: bytes of a number in which it
    computes. joint: text is in the sequence of self-attention. patch: latent pixels of a token (T, H, W).
    pixels: frames, and pixels along each side, of a latent pixel (T, H, W); one frame for images. scratch:
    bytes in which one quantized weight is dequantized, or multiplied some tokens at a time; scratch_of_cuts:
    what tensor parallelism takes besides, whose ranks compare the inputs of a native product. whole_only: why
    it runs with CFG and data parallelism only, or empty; tensor: whether matrices can be cut. is_quantized:
    weights stay as the file stores them, with LoRAs next to them. sharding_needs: what the ranks' torch lacks
    to shard these weights, or empty. rings: whether ranks have ring attention. compiles: whether ranks on
    GPUs can compile blocks. head_groups: of heads that tensor parallelism leaves together, where keys and
    values have fewer than queries. static_text: keys and values of the text are cached for a request.
    kv_heads: of keys and values; 0 for as many as queries have. padded_prompt: tokens to which a shorter
    prompt is padded before cross-attention. image_features: tokens of an image that cross-attention usually
    reads next to the prompt. shared_embeddings: of an evaluation, from which modulation of all samples and
    prompts is computed; 0 where each has its own."""

    name: str
    family: str
    blocks: tuple[BlockShape, ...]
    rest: int
    heads: int
    head_size: int
    width: int
    itemsize: int
    joint: bool
    patch: tuple[int, int, int] = (1, 2, 2)
    pixels: tuple[int, int, int] = (1, 8, 8)
    activations: Activations = Activations()
    scratch: int = 0
    scratch_of_cuts: int = 0
    whole_only: str = ""
    tensor: bool = True
    is_quantized: bool = False
    sharding_needs: str = ""
    rings: bool = True
    compiles: bool = True
    head_groups: int = 0
    static_text: bool = False
    kv_heads: int = 0
    padded_prompt: int = 0
    image_features: int = 0
    shared_embeddings: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash all blocks once: shapes are keys of caches, looked up many times for every plan."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def sequence(self, image: int, text: int) -> int:
        """Count the tokens of self-attention."""
        return image + text if self.joint else image

    def kv_repeats(self, plan: ParallelConfig) -> int:
        """Return how often Ulysses sends each head of keys and values, so that no two ranks share groups."""
        if not self.kv_heads:
            return 1
        tp = plan.tensor_parallel_degree if plan.split_scheme == "megatron" else 1  # others leave all heads
        own = max(1, self.kv_heads // tp)
        heads = own * self.heads // self.kv_heads
        return kv_heads_sent(heads, own, plan.ulysses_degree, shares=plan.shares_of("ulysses")) // own

    @property
    def weights(self) -> int:
        """Bytes of all weights, as stored."""
        return self.rest + sum(block.weights + block.modulation for block in self.blocks)

    def as_dict(self) -> dict:
        """Return the fields for JSON, as ``from_dict`` reads them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "ModelShape":
        """Read what ``as_dict`` made. TypeError or KeyError for anything else."""
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(cls)}
        known |= {name: tuple(values[name]) for name in ("patch", "pixels")}
        known["blocks"] = tuple(BlockShape(**block) for block in values["blocks"])
        known["activations"] = Activations(**values["activations"])
        return cls(**known)

    @property
    def is_video(self) -> bool:
        """Return whether it makes videos: several frames to a latent's."""
        return self.pixels[0] > 1


@lru_cache(maxsize=256)
def _split(shape: ModelShape, degree: int, shares: tuple[float, ...]) -> stage_split.Stages:
    """Place blocks and their modulation as loading does (stage_split.plan)."""
    tokens = stage_split.IMAGE_TOKENS, stage_split.TEXT_TOKENS
    costs = [block.linear(*tokens) + block.attention(*tokens) for block in shape.blocks]
    weights = [block.weights for block in shape.blocks]
    modulation = [{str(index): block.modulation} for index, block in enumerate(shape.blocks)]
    return stage_split.plan(costs, weights, modulation, degree, shares=shares)


def stages_of(shape: ModelShape, degree: int, shares: tuple[float, ...] = ()) -> list[range]:
    """Return the blocks of each of ``degree`` stages with these ``shares`` of the work."""
    return _split(shape, degree, shares).blocks


def modulation_of(shape: ModelShape, degree: int, shares: tuple[float, ...] = ()) -> list[int]:
    """Return the bytes of modulation that each of ``degree`` stages holds, for its own blocks or others'."""
    sizes = [0] * degree
    for index, stage in _split(shape, degree, shares).holders.items():
        sizes[stage] += shape.blocks[int(index)].modulation
    return sizes
