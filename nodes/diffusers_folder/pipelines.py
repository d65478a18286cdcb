"""Text encoders and VAE of a folder in diffusers' layout, run by diffusers' own pipeline. Nothing here
imports ComfyUI, and diffusers is imported when a folder is opened.

How a prompt becomes hidden states (template, padding, layers, which of them are used) is the pipeline's own
code; which of its results are which part of a CONDITIONING is data, an entry for each pipeline.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...backend.errors import UnsupportedError, quoted, reason
from ...backend.loading.files.regular_files import INDEXES, check_regular, is_pipeline, read_json
from ...backend.protocol import RefusedError
from ...backend.runtime.install_command import install_command

_BOTH = ("prompt_embeds", "negative_prompt_embeds")
_MASK = ("prompt_attention_mask", "negative_prompt_attention_mask")
_MASKED = (_BOTH[0], _MASK[0], _BOTH[1], _MASK[1])
#: Pipeline -> what its encode_prompt returns, in order, by diffusers' names; None: what its transformer
#: does not take.
RETURNS = {
    "SanaPipeline": _MASKED,
    "SanaVideoPipeline": _MASKED,
    "MochiPipeline": _MASKED,
    "AuraFlowPipeline": ("prompt_embeds", None, "negative_prompt_embeds", None),
    "CogView3PlusPipeline": _BOTH,
    "CogView4Pipeline": _BOTH,
    "SkyReelsV2Pipeline": _BOTH,
    "OvisImagePipeline": (*_BOTH, None, None),
    "QwenImage21Pipeline": ("prompt_embeds", "prompt_embeds_mask", None),
}
#: ModularPipelines whose block "text_encoder" gives ``prompt_embeds``.
MODULAR = ("Flux3ModularPipeline", "Flux3DistilledModularPipeline")
#: diffusers' name -> key of a CONDITIONING.
KEYS = {
    "prompt_embeds": "cond",
    "prompt_attention_mask": "attention_mask",
    "prompt_embeds_mask": "attention_mask",
    "pooled_prompt_embeds": "pooled_output",
}
#: The largest text encoders have about a hundred layers.
MAX_LAYERS = 1_024
#: Entries whose names end so count modules of Python, each of which takes time and memory.
COUNTS = ("layers", "_depth", "depths", "num_experts", "layers_per_block")
#: Entries that name the code of attention or experts; a name with a slash is that of a repository, from which
#: transformers would load it.
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
#: How the parts of a folder begin that encode prompts.
_TEXT_PARTS = ("text_encoder", "tokenizer", "processor")


@dataclass(frozen=True)
class TextPipeline:
    """The text encoders of a folder.

    ``encode``: (text, whether it is the negative prompt, device on which ``modules`` are) -> {key of a
    CONDITIONING: tensor}, with ``cond`` (1, T, E).
    """

    name: str
    modules: torch.nn.ModuleDict
    encode: Callable[[str, bool, torch.device], dict[str, torch.Tensor]]


def pipeline_name(folder: Path) -> str:
    """Return the name of the folder's pipeline; RefusedError for one that is none, or unknown here."""
    index = _index(folder)
    if index is None:
        raise RefusedError(
            f"the folder {folder.name} has no {INDEXES[0]}, so it is no pipeline with text encoders and a "
            f"VAE; download the whole folder that is published for diffusers, not its transformer alone."
        )
    name = index.get("_class_name")
    if name not in (*RETURNS, *MODULAR):
        raise RefusedError(
            f"the folder {folder.name} is of {quoted(name)}, and nothing here says how that encodes "
            f"prompts; known are {', '.join((*RETURNS, *MODULAR))}. Use ComfyUI's own loaders (CLIPLoader, "
            f"VAELoader) where it has that model's encoders."
        )
    return name


def has_encoders(folder: Path) -> bool:
    """Return whether a folder holds a pipeline with text encoders and a VAE; nothing is read."""
    return is_pipeline(folder) and (folder / "vae").is_dir() and any(folder.glob("text_encoder*/"))


def open_text(folder: Path) -> TextPipeline:
    """Open the text encoders of a pipeline's folder on the CPU and in the precision of their files.
    RefusedError where a part is missing or cannot be read."""
    name = pipeline_name(folder)
    return (_open_blocks if name in MODULAR else _open_pipeline)(folder, name)


def open_vae(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Open the VAE of a pipeline's folder on the CPU. RefusedError as in ``open_text``."""
    pipeline_name(folder)  # refuses what is no pipeline
    _require(folder, ["vae"], "latents are decoded")
    from diffusers.models.auto_model import AutoModel

    options = dict(dtype=dtype, use_safetensors=True, local_files_only=True)
    vae = _read(folder, "vae", AutoModel.from_pretrained, str(folder / "vae"), **options)
    return vae.eval().requires_grad_(False)


def _text_parts(folder: Path, parts: dict) -> list[str]:
    """Return the parts that encode prompts; RefusedError where there are none, or they bring code."""
    used = [part for part, (library, _) in parts.items() if part.startswith(_TEXT_PARTS) and library]
    foreign = next((f"{part} ({parts[part][0]})" for part in used if parts[part][0] != "transformers"), None)
    if foreign:
        raise RefusedError(
            f"the folder {folder.name} brings code of its own for its {quoted(foreign)}, which is not run; "
            f"use a folder whose text encoders are classes of transformers."
        )
    if not any(part.startswith("text_encoder") for part in used):
        raise RefusedError(
            f"the folder {folder.name} names no text encoder in its {INDEXES[0]}, so prompts cannot be "
            f"encoded with it; download the whole folder that is published for diffusers."
        )
    return used


def _open_pipeline(folder: Path, name: str) -> TextPipeline:
    index = _index(folder)
    assert index is not None  # pipeline_name has read it
    parts = {part: value for part, value in index.items() if isinstance(value, list) and len(value) == 2}
    used = _text_parts(folder, parts)
    _require(folder, used, "prompts are encoded")
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    options = dict(dtype={"default": "auto"}, use_safetensors=True, local_files_only=True)
    options |= dict.fromkeys(parts.keys() - set(used))  # None: not opened
    pipeline = _read(folder, "text encoders", DiffusionPipeline.from_pretrained, str(folder), **options)
    modules = _modules({part: getattr(pipeline, part) for part in used})
    return TextPipeline(name, modules, partial(_encode, pipeline, name))


def _encode(pipeline, name: str, text: str, negative: bool, device: torch.device) -> dict:
    """Return what ``encode_prompt`` of the pipeline ``name`` makes of a text, as TextPipeline.encode does."""
    accepted = inspect.signature(pipeline.encode_prompt).parameters
    # the pipeline's call has defaults of its own (lengths, instructions), which it hands on
    own = inspect.signature(type(pipeline).__call__).parameters
    arguments = {key: p.default for key, p in own.items() if p.default is not p.empty}
    separate = negative and "negative_prompt" in accepted
    arguments |= {"prompt": "", "negative_prompt": text} if separate else {"prompt": text}
    arguments |= {"device": device, "do_classifier_free_guidance": separate}
    try:
        encoded = pipeline.encode_prompt(**{key: arguments[key] for key in arguments if key in accepted})
    except NameError as error:  # diffusers leaves out the import of a package that is not there
        raise RefusedError(
            f"{name} cleans prompts with the package {error.name}, which ComfyUI's Python does not have; "
            f"run: {install_command([str(error.name)])}"
        ) from error
    named = {
        key: value for key, value in zip(RETURNS[name], encoded, strict=True) if key and value is not None
    }
    return {
        KEYS[key.removeprefix("negative_")]: value
        for key, value in named.items()
        if key.startswith("negative_") == separate
    }


def _open_blocks(folder: Path, name: str) -> TextPipeline:
    import diffusers

    blocks = getattr(diffusers, getattr(diffusers, name).default_blocks_name)()
    block = blocks.sub_blocks["text_encoder"]
    specs = {spec.name: spec for spec in block.expected_components}
    _require(folder, list(specs), "prompts are encoded")

    def load(spec):
        options = {"subfolder": spec.name, "local_files_only": True}
        if "text_encoder" in spec.name:
            options |= {"dtype": "auto", "use_safetensors": True}
        return spec.load(pretrained_model_name_or_path=str(folder), **options)

    parts = {part: _read(folder, "text encoder", load, spec) for part, spec in specs.items()}
    pipeline = block.init_pipeline()
    pipeline.update_components(**parts)

    def encode(text: str, negative: bool, device: torch.device) -> dict:
        return {"cond": pipeline(prompt=text, output="prompt_embeds")}  # negative prompts as any other

    return TextPipeline(name, _modules(parts), encode)


def _modules(parts: dict) -> torch.nn.ModuleDict:
    modules = {part: value for part, value in parts.items() if isinstance(value, torch.nn.Module)}
    return torch.nn.ModuleDict(modules).eval().requires_grad_(False)


def _index(folder: Path) -> dict | None:
    """Return what a pipeline's folder says of its parts; None for a folder that is no pipeline's."""
    found = next((name for name in INDEXES if (folder / name).is_file()), None)
    if found is None:
        return None
    return _read(folder, found, read_json, folder / found)


def _require(folder: Path, parts: list[str], purpose: str):
    missing = [part for part in parts if not (folder / part).is_dir()]
    if missing:
        raise RefusedError(
            f"the folder {folder.name} has no {' and no '.join(missing)}, with which {purpose}; download "
            f"the whole folder that is published for diffusers."
        )
    for part in parts:
        _read(folder, part, check_regular, folder / part)
        _read(folder, part, _check_config, folder / part)


def _check_config(part: Path):
    """Refuse a part with more layers than any published one, which its library would build in ComfyUI's own
    process, or code to load. Raises UnsupportedError."""
    config = part / "config.json"
    for name, value in _entries(read_json(config) if config.is_file() else {}):
        counted = value if isinstance(value, list) else [value]
        if name.endswith(COUNTS) and any(isinstance(each, int) and each > MAX_LAYERS for each in counted):
            raise UnsupportedError(f"{part.name} has {quoted(value)} as {name}, {MAX_LAYERS:,} at most")
        if name.endswith(IMPLEMENTATIONS) and "/" in str(value):
            raise UnsupportedError(
                f"{part.name} names code to load, {quoted(value)} as {name}: take that out"
            )


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a configuration and of those within it."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield str(name), value
        yield from _entries(value)


def _read(folder: Path, what: str, action: Callable, /, *arguments, **options):
    """Return what ``action`` reads; RefusedError with the library's reason where it cannot. ``options``: any
    name may be one, as those of a folder's parts are."""
    try:
        return action(*arguments, **options)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
        lines = (line for line in str(error).splitlines() if line.strip())
        first = reason(next(lines, type(error).__name__))
        raise RefusedError(
            f"the {what} of the folder {folder.name} cannot be read ({first}); download its files "
            f"(.safetensors, configurations and tokenizer) again."
        ) from error
