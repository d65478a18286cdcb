"""Key layouts: how a family's single files name the parameters of the diffusers transformer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..runtime.callbacks import no_entries

Shapes = Mapping[str, tuple[int, ...]]

#: Prefixes under which full checkpoints keep their transformer.
PREFIXES = (
    "model.diffusion_model.",
    "model.model.",
    "diffusion_model.",
    "transformer.",
    "net.",
    "model.",
    "",
)
#: Tensors next to a transformer that it does not read (patterns) -> why they may be there.
ALWAYS_UNREAD = {
    "first_stage_model.*": "the VAE of an all-in-one file",
    "vae.*": "the VAE of an all-in-one file",
    "audio_vae.*": "the audio's VAE of an all-in-one file",
    "vocoder.*": "what makes the audio of an all-in-one file",
    "cond_stage_model.*": "the text encoder of an all-in-one file",
    "conditioner.*": "the text encoders of an all-in-one file",
    "text_encoders.*": "the text encoders of an all-in-one file",
    "text_embedding_projection.*": "the text encoder's last layer in an all-in-one file",
    "model_ema.*": "a second set of weights, for training on",
}
#: How files that ComfyUI saved call the norms of queries and keys.
NORM_SPELLINGS = (("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale"))


@dataclass(frozen=True)
class CompanionFolder:
    """A folder of a diffusers pipeline whose tensors are part of the transformer here, as in ComfyUI's files.

    config: its configuration -> entries of the transformer's. names: prefix of a parameter here -> there.
    """

    folder: str
    config: Callable[[Mapping], dict]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """How a single file names a family's tensors.

    signature: keys that tell the family; absent: keys of other families. unread: tensors (patterns) that
    the model does not need -> why.
    config: shapes -> arguments of the diffusers class. metadata: strings of the header -> more of them;
    named: the file's name -> more of them, which nothing in the file tells; may raise UnsupportedError.
    names: file's module -> diffusers modules (space separated) stacked in its rows, both with {} for the
    block number; a whole tensor (.weight, .scale) maps to a whole parameter. Others keep their name.
    swapped: diffusers modules whose two halves of rows are the other way round, {} being the number of every
    block, {last} that of the last one. reshaped: diffusers parameters that the file stores in another shape.
    spellings: (theirs, ours) replacements, in order, in keys of other spellings.
    apart: as names, of modules that some files keep apart where names has them stacked.
    companion: what a diffusers pipeline keeps apart from its transformer.
    moved: transformer config -> prefix of parameters here -> in files with diffusers' names, where a family's
    transformer has modules at other places.
    by_head: file's module of stacked q, k and v -> parameter as long as a head, where LoRAs of DiffSynth have
    these rows head by head.
    """

    signature: tuple[str, ...]
    config: Callable[[Shapes], dict]
    names: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    apart: Mapping[str, str] = field(default_factory=dict)
    metadata: Callable[[Mapping[str, str]], dict] = no_entries
    named: Callable[[str], dict] = no_entries
    unread: Mapping[str, str] = field(default_factory=dict)
    companion: CompanionFolder | None = None
    moved: Callable[[Mapping], Mapping[str, str]] = no_entries
    by_head: Mapping[str, str] = field(default_factory=dict)

    def keys(self, keys: Collection[str]) -> dict[str, str] | None:
        """Map this layout's keys, without prefix, in one spelling, to the file's; None for another layout."""
        for prefix in PREFIXES:
            if not self.spellings and any(prefix + key not in keys for key in self.signature):
                continue  # without a look at each key, of which there may be many
            spelled = {self.spell(key.removeprefix(prefix)): key for key in keys if key.startswith(prefix)}
            has_signature = all(key in spelled for key in self.signature)
            if has_signature and not any(key in spelled for key in self.absent):
                return spelled
        return None

    def as_in(self, keys: Collection[str]) -> "Layout":
        """Return the layout of a file with these keys, of this spelling: modules may be ``apart`` in it."""
        first = next(iter(self.apart), "").replace("{}", "0")
        if f"{first}.weight" not in keys:
            return self
        alone = set(self.apart.values())
        stacked = {name: targets for name, targets in self.names.items() if alone.isdisjoint(targets.split())}
        return replace(self, names=stacked | dict(self.apart), apart={})

    @property
    def most_parameters(self) -> int:
        """How many parameters one of the file's tensors holds at most."""
        return max((len(targets.split()) for targets in self.names.values()), default=1)

    def spell(self, key: str, separator: str = ".") -> str:
        """Return a key of another spelling in this one; ``separator``: what stands for dots in it."""
        for theirs, ours in self.spellings:
            if separator != ".":
                theirs = theirs.replace(".", separator)
                ours = ours.replace(".", separator)
            key = key.replace(theirs, ours)
        return key


#: What files call the two layers of an embedder -> diffusers.
IN_OUT = {"in_layer": "linear_1", "out_layer": "linear_2"}
MLP = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
LAYERS = {"0": "linear_1", "2": "linear_2"}


def renamed(prefixes: Mapping[str, str], keys: Mapping[str, str]) -> dict[str, str]:
    """Map parameters to a file's keys, where they begin otherwise here than diffusers' own names.

    ``prefixes``: here -> in diffusers. ``keys``: diffusers' names -> the file's.
    """
    return {
        here + name.removeprefix(in_diffusers): key
        for here, in_diffusers in prefixes.items()
        for name, key in keys.items()
        if name.startswith(in_diffusers)
    }


def under(in_file: str, in_diffusers: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return Layout.names of the modules ``names`` of the module ``in_file``, which diffusers has as
    ``in_diffusers``."""
    return {
        f"{in_file}.{name}": " ".join(f"{in_diffusers}.{target}" for target in targets.split())
        for name, targets in names.items()
    }


def blocks_of(shapes: Shapes, name: str) -> int:
    """Count the blocks that a file has under ``name``."""
    return len({key.removeprefix(name + ".").split(".")[0] for key in shapes if key.startswith(name + ".")})


def rope_axes(head: int) -> tuple[int, int, int]:
    """Return the features of the RoPE axes of a head of so many, (16, 56, 56)/128 of it, all even."""
    axis = 56 * head // 128 // 2 * 2
    return head - 2 * axis, axis, axis
