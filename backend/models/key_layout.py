"""Key layouts: how a family's single files name the parameters of the diffusers transformer."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

Shapes = Mapping[str, tuple[int, ...]]
#: Prefixes under which full checkpoints keep their transformer.
PREFIXES = ("model.diffusion_model.", "model.model.", "diffusion_model.", "transformer.", "")


@dataclass(frozen=True)
class CompanionFolder:
    """A folder of a diffusers pipeline whose tensors are part of the transformer here, as in ComfyUI's files:
    its name, its configuration -> entries of the transformer's, and the prefix of a parameter here -> that of
    the folder's."""

    folder: str
    config: Callable[[Mapping], dict]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """How a single file names a family's tensors.

    signature: keys that tell the family; absent: keys that tell another one; variants: key -> name of a
    variant that is not supported and has it.
    names: file's module -> diffusers modules (space separated) stacked in its rows, both with {} for the
    block number; a name of a whole tensor (with .weight or .scale) maps to a whole parameter name. swapped:
    diffusers modules whose two halves of rows are the other way round, {} being the number of every block,
    {last} that of the last one. reshaped: diffusers parameters that the file stores in another shape of as
    many elements. A parameter that ``names`` does not reach is looked for under its own name. spellings:
    (theirs, ours) replacements, in order, that turn other spellings of the file's keys into this one. config:
    shapes -> arguments of the diffusers class. metadata: strings of the file's header -> more of them.
    companion: what a diffusers pipeline keeps apart from its transformer.
    """

    signature: tuple[str, ...]
    config: Callable[[Shapes], dict]
    names: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    swapped: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    metadata: Callable[[Mapping[str, str]], dict] = lambda strings: {}
    variants: Mapping[str, str] = field(default_factory=dict)
    companion: CompanionFolder | None = None

    def keys(self, keys: Collection[str]) -> dict[str, str] | None:
        """This layout's keys, without prefix and in one spelling, -> the file's ``keys``; None where the file
        is of another layout."""
        for prefix in PREFIXES:
            if not self.spellings and any(prefix + key not in keys for key in self.signature):
                continue  # without a look at each key, of which there may be many
            found = {self.spell(key.removeprefix(prefix)): key for key in keys if key.startswith(prefix)}
            if all(key in found for key in self.signature) and not any(
                key in found for key in (*self.absent, *self.variants)
            ):
                return found
        return None

    def unsupported(self, keys: Collection[str]) -> str | None:
        """The name of a variant that is not supported and that ``keys`` are of."""
        if not self.spellings:
            known = ((prefix + key, name) for prefix in PREFIXES for key, name in self.variants.items())
            return next((name for key, name in known if key in keys), None)
        bare = {
            self.spell(key.removeprefix(prefix))
            for prefix in PREFIXES
            for key in keys
            if key.startswith(prefix)
        }
        return next((name for key, name in self.variants.items() if key in bare), None)

    @property
    def most_parameters(self) -> int:
        """How many parameters one of the file's tensors holds at most."""
        return max((len(targets.split()) for targets in self.names.values()), default=1)

    def spell(self, key: str) -> str:
        """A key of another spelling in this one."""
        for theirs, ours in self.spellings:
            key = key.replace(theirs, ours)
        return key


def blocks_of(shapes: Shapes, name: str) -> int:
    """How many blocks a file has under ``name``."""
    return len({key.removeprefix(name + ".").split(".")[0] for key in shapes if key.startswith(name + ".")})
