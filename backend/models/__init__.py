"""Model families, one file each (data, calls and key layout), found by name or by the transformer's class."""

from . import (
    chroma,
    cogvideox,
    flux,
    flux2,
    flux3,
    hidream,
    hunyuan_dit,
    hunyuan_image21,
    hunyuan_video,
    hunyuan_video15,
    ideogram4,
    kandinsky5,
    krea2,
    ltx2,
    ltxv,
    lumina2,
    minimax_h3,
    minimax_h3_curves,
    pixart,
    qwen_image,
    qwen_image21,
    sana,
    sd3,
    wan,
    wan_animate,
    wan_vace,
    z_image,
)
from .family import Family

MODULES = (
    flux,
    chroma,
    sd3,
    pixart,
    hunyuan_dit,
    hunyuan_video15,
    hunyuan_video,
    hunyuan_image21,
    wan,
    wan_vace,
    wan_animate,
    cogvideox,
    ltxv,
    qwen_image,
    qwen_image21,
    z_image,
    krea2,
    kandinsky5,
    hidream,
    sana,
    minimax_h3,
    minimax_h3_curves,
    flux2,
    lumina2,
    ideogram4,
    flux3,
    ltx2,
)
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in MODULES}


def family_of_class(transformer: str) -> Family | None:
    """The family of a diffusers transformer class; None for one that has no file here."""
    return next((family for family in FAMILIES.values() if family.transformer == transformer), None)
