"""Messages between a client (the nodes, a script) and rank 0: frozen dataclasses, sent by framing.py."""

import zlib
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from ..config import AXES, OF_RANKS

#: Changes where a field of the messages has another meaning.
MEANING = 4
#: Separates the name of a model from its LoRAs, in the names of models with LoRAs.
LORAS = "+"
#: ComfyUI's names of the ways to place reference latents; the model argument ``ref_latents_method`` travels
#: as an index into them.
REFERENCE_METHODS = ("offset", "index", "index_timestep_zero", "uxo", "negative_index")


@dataclass(frozen=True)
class Hello:
    """First message of a client: asks the backend to prove that it knows the token (handshake.py)."""

    nonce: str
    version: int = field(default_factory=lambda: VERSION)


@dataclass(frozen=True)
class Challenge:
    """Answer to Hello: the backend's proof, and its nonce, for which it asks the same of the client."""

    nonce: str
    proof: str


@dataclass(frozen=True)
class Proof:
    """Answer to Challenge: the client's proof."""

    proof: str


@dataclass(frozen=True)
class Welcome:
    """Answer to Proof: what runs behind this socket. ``devices``: the name of every rank's memory
    (device_name), so that a client knows which it uses too. ``settings``: ParallelConfig.of_ranks."""

    world_size: int
    device: str
    degrees: dict
    pids: list
    devices: list = field(default_factory=list)
    settings: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Arrange:
    """Run ``config`` (a ParallelConfig's fields) on the same ranks in other process groups; the answer is a
    Welcome. Models of which some rank then holds another part are freed; Pong lists what is left."""

    config: dict


@dataclass(frozen=True)
class Load:
    """Load the transformer at ``path``, a file or a diffusers folder, unless it is loaded. ``loras``,
    [[path, strength], ...] in order, are checked now and fused when the model is sampled. ``matmul``: how
    quantized layers multiply (auto, weight only, native). ``autodetected``, ``products``: what rank 0
    broadcasts to the others (Checkpoint.autodetected; Engine.products); not read from clients.
    ``can_make_room``: ranks on devices where the client can make room; where one likely has too little, the
    answer is a Failure that says what is lacking."""

    path: str
    weight_dtype: str = "default"
    loras: list = field(default_factory=list)
    matmul: str = "auto"
    autodetected: dict = field(default_factory=dict)
    can_make_room: list = field(default_factory=list)
    products: list = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """``model`` names the transformer with its LoRAs in later requests; ``info`` is what the client needs to
    know of it. ``info["warnings"]``: a sentence for each LoRA, empty where all of it is used;
    ``info["notes"]``: a short line for each, of how much is added. ``info["lora_bytes"]``: what all of them
    take next to the quantized weights of the whole model (LoraBytes). ``info["ranks"]``: what the load cost
    each rank (LoadReport). ``info["quantized"]``: rank 0's quantized layers and how they multiply."""

    model: str
    family: str
    info: dict = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Names the transformer without its LoRAs; the weights are held once for all models of one base."""
        return self.model.partition(LORAS)[0]


@dataclass(frozen=True)
class Describe:
    """Ask what each rank would hold and send while ``model`` is sampled so; nothing is computed. ``latent``:
    [C, [T,] H, W], of the first where there are several; ``prompts``: 2 with a negative one; ``batch``:
    samples of the latent; ``references``: [T, H, W] of each reference latent; ``drained``: as a ModelCall,
    with all prompts in one."""

    model: str
    latent: list
    text_tokens: int
    prompts: int
    num_pipeline_patch: int = 0
    stale_kv: str = "reuse"
    wire: str = "full"
    batch: int = 1
    references: list = field(default_factory=list)
    drained: bool = False


@dataclass(frozen=True)
class Described:
    """``ranks``: rank_plan.RankPlan.as_dict() of each."""

    ranks: list


@dataclass(frozen=True)
class Unload:
    """Free the transformer ``model`` on every rank; no error where it is not loaded. ``park``: keep its
    weights in host memory where that has room, on ``ranks`` alone (all where there are none); the next
    request for it brings them back. Where they cannot be parked, every rank frees them, unless it ``keeps``
    the model. ``yields``: models that this client can do without, the least recently used first; parked ones
    are freed for one that parks, one after another (stats["dropped"]). stats["left"] lists the ranks that
    have none on their device now. What parks while another client's request runs is answered at once, with
    none, unless it ``waits``."""

    model: str
    park: bool = False
    ranks: list = field(default_factory=list)
    keeps: bool = False
    waits: bool = False
    yields: list = field(default_factory=list)


@dataclass(frozen=True)
class Release:
    """Give the cached memory of ``ranks`` back to their devices, which others use too. ``forget``: clients
    of model calls whose cached arguments every rank frees first."""

    ranks: list
    forget: list = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """Denoise one latent.

    tensors: ``noise`` and ``latent`` (B, C, [T,] H, W) in the model's latent space. Several latents (video
    and audio) lie flattened one after the other, (B, 1, L), with their shapes in ``latent_shapes``.
    ``sigmas`` (steps + 1,); ``denoise_mask`` (broadcast to the latent's shape), if any; ``percent_sigmas``
    (float64, noise levels after the fractions solver_names.PERCENTS) for solvers that need them.
    ``positive.KEY``, ``negative.KEY``: model arguments under ComfyUI's names (``c_crossattn``, ...), lists as
    ``KEY.0``, ``KEY.1``, ...; further prompts are ``positive2.KEY``, ``positive3.KEY``, ...

    ``prompts`` says how they are mixed: name -> {"strength": 1.0, "from": the highest noise level at which
    it counts, "until": the lowest}, each optional. A tensor ``weight.NAME`` (broadcast to the latent's shape)
    is a strength that differs from place to place. ``preview_seconds``: least time between two x0 previews,
    0 sends none. ``denoised`` asks for the last step's prediction in the Result. ``can_make_room``: as in
    Load. ``shared_ranks``: ranks on devices that others use too, which give their cached memory back at the
    end: before a Result, and after Cancelled, when their GPUs have ended what they had started.
    """

    model: str
    sampler: str
    cfg: float
    seed: int
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    stale_kv: str = "reuse"
    attention: str = "auto"
    compile: str = "auto"
    wire: str = "full"
    preview_seconds: float = 0.0
    denoised: bool = False
    prompts: dict = field(default_factory=dict)
    latent_shapes: list = field(default_factory=list)
    can_make_room: list = field(default_factory=list)
    shared_ranks: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCall:
    """Evaluate the model once; the Result's tensor ``output`` is what it returns, float32, in ``x``'s shape.

    tensors: ``x`` (B, C, [T,] H, W), scaled for the model, with a family's further input channels (c_concat)
    after its own, or (B, 1, L) with ``latent_shapes`` as in Sample; ``time`` (B,), the noise level of flow
    models, the timestep of others; arguments as ``cond.KEY`` with ComfyUI's names, one for each sample or one
    for all. The backend caches the tensors that ``cache`` names (name -> key) for this ``client`` until a
    call's ``forget`` has the key; ``cached`` (name -> key) stands for cached ones. Where some are no longer
    there, the Result has no output but their names as ``stats["missing"]``: send them again.
    ``can_make_room``: as in Load.
    """

    model: str
    attention: str = "auto"
    compile: str = "auto"
    wire: str = "full"
    client: str = ""
    latent_shapes: list = field(default_factory=list)
    cache: dict = field(default_factory=dict)
    cached: dict = field(default_factory=dict)
    forget: list = field(default_factory=list)
    can_make_room: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)


#: Requests that leave the queue where a Cancel finds them waiting.
WITHDRAWABLE = (Load, Describe, Sample, ModelCall, Unload)


@dataclass(frozen=True)
class Progress:
    """``step`` of ``total`` steps are done; in a Load, of the bytes that rank 0 reads of the files. tensors
    may hold ``x0``, the latest denoised prediction that has arrived, in the shape of the request's latent:
    on GPUs of an earlier step."""

    step: int
    total: int
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """tensors: ``samples`` (float32, shape and space of the request's latent) and ``denoised`` likewise where
    it was asked for; ``output`` of a ModelCall. ``stats``: seconds and counters."""

    stats: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Stop the running request of this connection at the next step, a waiting WITHDRAWABLE one at once."""


@dataclass(frozen=True)
class Cancelled:
    """The request stopped at ``step``; the model stays loaded. Its memory goes back later (Sample)."""

    step: int = 0


@dataclass(frozen=True)
class Waiting:
    """The oldest request of this connection waits for another client's; said when it is queued, and as that
    one goes on. ``running``: its kind, empty where it has yet to begin, and "Cancel" where it was cancelled
    and ranks give its memory back, this connection's own too; ``step`` of ``total``: as in Progress, of a
    Sample or a Load, 0 of 0 where nobody knows; ``before``: requests that wait before this connection's own.
    A request that waits for nobody has neither this nor Begun."""

    running: str = ""
    step: int = 0
    total: int = 0
    before: int = 0


@dataclass(frozen=True)
class Begun:
    """The request of which Waiting was said begins."""


@dataclass(frozen=True)
class Failure:
    """A request that was refused, or, where ``fatal``, that ended the backend. ``lacking``: [[rank, bytes
    that should be free on its device], ...] where there was too little."""

    message: str
    fatal: bool = False
    lacking: list = field(default_factory=list)


@dataclass(frozen=True)
class Ping:
    """Ask whether the backend is alive, which a Pong answers. Rank 0 broadcasts it to idle ranks."""


@dataclass(frozen=True)
class Pong:
    """Answer to Ping: the names of the ``models`` that are loaded, without LoRAs."""

    models: list = field(default_factory=list)


@dataclass(frozen=True)
class Status:
    """How is the backend? Answered with a Report while the ranks work, too."""


@dataclass(frozen=True)
class Report:
    """``seconds`` since the start; ``models``: name -> path; ``ranks``: a dict each of its rank,
    machine, pid, weight_bytes (on its device), device_bytes (that its allocator had there after its last
    message; 0 where nobody says), resident_bytes (of its process; 0 on another machine) and its last
    ``steps`` (serving/step_times.py); ``running``: kind of the request under way, empty for none, for
    ``running_seconds``; ``waiting`` requests; ``answered``: kind -> number so far; ``last_error``: the last
    refusal."""

    seconds: float
    models: dict
    ranks: list
    running: str
    running_seconds: float
    waiting: int
    answered: dict
    last_error: str


@dataclass(frozen=True)
class Shutdown:
    """End every rank; a ``reason`` is sent to every client at once, while the ranks may hang."""

    reason: str = ""


#: Every dataclass above under its name, which travels in the header.
MESSAGES: dict[str, Any] = {name: cls for name, cls in list(globals().items()) if is_dataclass(cls)}


def version_of(messages: dict[str, Any]) -> int:
    """Return the number of the protocol of these messages: names, fields, MEANING, a Welcome's entries."""
    listed = sorted((name, [(f.name, str(f.type)) for f in fields(cls)]) for name, cls in messages.items())
    return zlib.crc32(repr((MEANING, listed, AXES, OF_RANKS)).encode())


#: Clients and backends of one version understand each other.
VERSION = version_of(MESSAGES)
