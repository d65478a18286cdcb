"""Model families, one data file each, found by name or by the transformer's class."""

from ..errors import UnsupportedError
from . import flux
from .spec import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (flux.FAMILY,)}


def family_of_class(transformer: str) -> Family:
    """The family of a diffusers transformer class; UnsupportedError for one that has no file here."""
    for family in FAMILIES.values():
        if family.transformer == transformer:
            return family
    known = ", ".join(family.transformer for family in FAMILIES.values())
    raise UnsupportedError(f"the transformer class {transformer} is not supported yet; supported: {known}.")
