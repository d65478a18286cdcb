"""Messages between a client (the nodes, a script) and rank 0: frozen dataclasses, which frames.py brings
over."""

from dataclasses import dataclass, field

#: Clients and backends of one version understand each other.
VERSION = 2
#: Separates the name of a model from its LoRAs, in the names of models with LoRAs.
LORAS = "+"
#: ComfyUI's names of the ways to place reference latents; the model argument ``ref_latents_method`` travels
#: as an index into them.
REFERENCE_METHODS = ("offset", "index", "index_timestep_zero", "uxo", "negative_index")


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol; the connection is closed."""


class BackendError(RuntimeError):
    """The backend ended or cannot be reached; the message names the rank and the log where they are known."""


class RefusedError(ValueError):
    """The backend refused a request and stays warm; the message says what, why and the remedy."""


@dataclass(frozen=True)
class Hello:
    """First message of a client: asks the backend to prove that it knows the token (handshake.py)."""

    nonce: str
    version: int = VERSION


@dataclass(frozen=True)
class Challenge:
    """Answer to Hello: the backend's proof, and its nonce, for which it asks the same of the client."""

    nonce: str
    proof: str


@dataclass(frozen=True)
class Proof:
    """Answer to Challenge; only then the client knows the token."""

    proof: str


@dataclass(frozen=True)
class Welcome:
    """Answer to Proof: what runs behind this socket."""

    world_size: int
    device: str
    degrees: dict
    pids: list


@dataclass(frozen=True)
class Arrange:
    """Run ``config`` (the fields of a ParallelConfig) on the same ranks, in other process groups; the answer
    is a Welcome. Models of which every rank holds the same part then as now stay loaded, the others are freed
    (Pong lists what is left)."""

    config: dict


@dataclass(frozen=True)
class Load:
    """Load the transformer at ``path`` (a file or a diffusers folder); a no-op where it is loaded already.

    ``loras``, [[path, strength], ...] in the order in which they are added, are checked here and fused when
    the model is sampled.
    """

    path: str
    weight_dtype: str = "default"
    loras: list = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """``model`` names the loaded transformer in later requests, its LoRAs included; ``info`` is the family's
    facts for the client, ``info["warnings"]`` has a sentence for each LoRA, empty where nothing of it was
    left out, and ``info["ranks"]`` what the load cost each rank (loading.report.LoadReport), the same until
    the degrees change; from then on nothing was read, where the transformer stays loaded."""

    model: str
    family: str
    info: dict = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Names the transformer without its LoRAs; the weights are held once for all models of one base."""
        return self.model.partition(LORAS)[0]


@dataclass(frozen=True)
class Describe:
    """What would each rank hold and send while the transformer ``model`` is sampled with these settings?
    ``latent``: [C, [T,] H, W] of one latent, the first where it takes several; ``prompts``: 2 with a negative
    one. Nothing is computed."""

    model: str
    latent: list
    text_rows: int
    prompts: int
    num_pipeline_patch: int = 0
    stale_kv: str = "reuse"


@dataclass(frozen=True)
class Described:
    """``image_rows``: tokens of the latent; ``ranks``: a line for each (rank_plan.RankPlan)."""

    image_rows: int
    ranks: list


@dataclass(frozen=True)
class Unload:
    """Free the transformer ``model`` on every rank, whatever its LoRAs (no error where it is not loaded)."""

    model: str


@dataclass(frozen=True)
class Sample:
    """Denoise one latent.

    tensors: ``noise`` and ``latent`` (B, C, [T,] H, W) in the model's latent space, or (B, 1, L) where a
    model denoises several latents (video and audio): ``latent_shapes`` are then theirs, [C, [T,] H, W] each,
    and they lie flattened one after the other; ``sigmas`` (steps + 1,), ``denoise_mask`` (broadcast to the
    latent's shape) where there is one, ``percent_sigmas`` (the model's noise levels after those fractions of
    sampling solver_names.PERCENTS, float64) for the solvers that need them, and the conditioning as
    ``positive.KEY`` / ``negative.KEY`` with ComfyUI's names of model arguments (``c_crossattn``, ``y``,
    ``guidance``, ...); a list of tensors is ``KEY.0``, ``KEY.1``, ... Further prompts of a side are
    ``positive2.KEY``, ``positive3.KEY``, ...; ``prompts`` says how
    they are mixed: name -> {"strength": 1.0, "from": the highest noise level at which it counts, "until": the
    lowest} (each may be left out), and a tensor ``weight.NAME`` (broadcast to the latent's shape) where its
    strength differs from place to place. ``preview_seconds`` is the least time between two x0 previews; 0
    sends none. ``denoised`` asks for the last step's prediction in the Result.
    """

    model: str
    sampler: str
    cfg: float
    seed: int
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    stale_kv: str = "reuse"
    attention: str = "auto"
    preview_seconds: float = 0.0
    denoised: bool = False
    prompts: dict = field(default_factory=dict)
    latent_shapes: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCall:
    """Evaluate the model once; the Result's tensor ``output`` (B, C, [T,] H, W) is what the model returns, in
    float32.

    tensors: ``x`` (B, C, [T,] H, W), the latent as scaled for the model, where a family has further input
    channels (c_concat) with those after its own, or several packed (B, 1, L) with their ``latent_shapes``,
    as in Sample, and ``output`` likewise; ``time`` (B,), the model's time input: the noise level
    of flow models, the timestep of others; the model's arguments as ``cond.KEY`` with ComfyUI's names, one
    for each sample, or one for all. The backend caches the tensors that ``keep`` names (name -> key), for
    this ``client``, until a call's ``forget`` has the key: then ``kept`` (name -> key) stands for a tensor.
    Where one is no longer there, the Result has no output but the names as ``stats["missing"]``: send them
    again.
    """

    model: str
    attention: str = "auto"
    client: str = ""
    latent_shapes: list = field(default_factory=list)
    keep: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)
    forget: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """``step`` of ``total`` steps are done; tensors may hold ``x0``, in the shape of the request's latent,
    the latest denoised prediction. While a Load runs: values of values."""

    step: int
    total: int
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """tensors: ``samples`` in the shape of the request's latent, float32, in the model's latent space, and
    ``denoised`` likewise where it was asked for; ``output`` of a ModelCall.
    ``stats``: seconds and counters."""

    stats: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Stop the running request of this connection at the next step."""


@dataclass(frozen=True)
class Cancelled:
    """The request stopped at ``step``; the model stays loaded."""

    step: int = 0


@dataclass(frozen=True)
class Failure:
    """A request that was refused (``fatal`` False, the backend stays warm) or that ended the backend
    (``fatal`` True)."""

    message: str
    fatal: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Ping:
    """Is the backend alive?"""


@dataclass(frozen=True)
class Pong:
    models: list = field(default_factory=list)


@dataclass(frozen=True)
class Shutdown:
    """End every rank."""


MESSAGES = {
    cls.__name__: cls
    for cls in (
        Hello,
        Challenge,
        Proof,
        Welcome,
        Arrange,
        Load,
        Loaded,
        Describe,
        Described,
        Unload,
        Sample,
        ModelCall,
        Progress,
        Result,
        Cancel,
        Cancelled,
        Failure,
        Ping,
        Pong,
        Shutdown,
    )
}
