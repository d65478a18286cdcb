"""What of a family the engine's code can see: families of one signature take the same paths through it."""

import variants

from backend.models import FAMILIES
from backend.models.blocks import BlockAdapter
from backend.models.family import Conditioning, Family

#: Golden families that begin with another family's name.
NAMED = {"wan21-vace": "wan-vace"}
#: The signature of a case: a family's, or what a variant adds to the request.
Signature = tuple


def family_of(case: str) -> Family:
    """The backend's family of a golden family, a variant or FAMILY+CHANGE: it begins with its name."""
    name = case.partition("+")[0]
    if name in variants.VARIANTS:
        name = variants.VARIANTS[name].family
    if name in NAMED:
        return FAMILIES[NAMED[name]]
    fitting = [family for family in FAMILIES if _plain(name).startswith(_plain(family))]
    return FAMILIES[max(fitting, key=len)]


def _plain(name: str) -> str:
    return name.replace("-", "").replace(".", "")


def overridden(adapter: BlockAdapter) -> tuple[str, ...]:
    """The names that a family's adapter says otherwise."""
    own, plain = type(adapter), BlockAdapter
    return tuple(
        name
        for name in vars(plain)
        if not name.startswith("_") and getattr(own, name) is not getattr(plain, name)
    )


def of_family(family: Family) -> Signature:
    """How a family's tokens pass the blocks, and what is cached of them."""
    blocks = family.blocks
    kinds = {kind for call in blocks.attention for kind in ([call] if isinstance(call, str) else call)}
    return (
        tuple(dict.fromkeys(blocks.lists.values())),
        blocks.text_position,
        blocks.text_mask != "",
        family.latent.nested is not None,
        "cross" in kinds,
        "linear" in kinds,
        family.cache.static_text,
        family.conditioning.context_tokens is not Conditioning.context_tokens,
        overridden(blocks.adapter),
    )


def of_case(case: str) -> Signature:
    """A family's signature; of a variant and of a mask what they add to a request, for families whose blocks
    carry text in the same way."""
    family = family_of(case)
    blocks = family.blocks
    streams = (tuple(blocks.lists.values())[-1], family.latent.nested is not None)
    if "+" in case:
        return ("masked text", *streams)
    if case not in variants.VARIANTS:
        return of_family(family)
    variant = variants.VARIANTS[case]
    references = any(name.startswith("ref_latents.") for name in variant.arguments)
    return ("variant", references, variant.mask is not None, *streams)


def kind_of_blocks(case: str) -> Signature:
    """What a compiler sees of a family: kinds of blocks, whether text is outside of the joint sequence
    (cross-attention), several latents, and linear attention."""
    family = family_of(case)
    blocks = family.blocks
    kinds = frozenset(blocks.lists.values())
    return kinds, blocks.text_position is None, family.latent.nested is not None, "linear" in blocks.attention


def representatives(cases: list[str]) -> dict[Signature, str]:
    """Signature -> the first of the cases that have it."""
    first = {}
    for case in cases:
        first.setdefault(of_case(case), case)
    return first
