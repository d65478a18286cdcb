"""ComfyUI's entry into the pack: see comfy_entrypoint. Without ComfyUI this is a plain package and imports
nothing."""

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]


async def comfy_entrypoint():
    """The pack's ComfyExtension; ComfyUI calls it at start."""
    from .nodes.extension import ParallelDiTExtension

    return ParallelDiTExtension()
