"""Model families, one file each (data, calls and key layout), found by name or by the transformer's class."""

from importlib import import_module

from .family import Family

#: Every family's file, a more special one before the general one: the first that recognises a model has it.
NAMES = """
    flux chroma sd3 pixart hunyuan_dit hunyuan_video15 hunyuan_video hunyuan_image21 wan wan_vace wan_animate
    cogvideox ltxv qwen_image qwen_image21 z_image krea2 kandinsky5 hidream sana minimax_h3 minimax_h3_curves
    flux2 lumina2 ideogram4 flux3 ltx2
""".split()
MODULES = [import_module(f".{name}", __name__) for name in NAMES]
FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in MODULES}


def family_of_class(transformer: str) -> Family | None:
    """Return the family of a diffusers transformer class; None for one that has no file here."""
    return next((family for family in FAMILIES.values() if family.transformer == transformer), None)
