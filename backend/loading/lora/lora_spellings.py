"""How trainers spell the keys of LoRA files: ComfyUI's, BFL's, kohya's, diffusers', PEFT's and LyCORIS'."""

import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from ...errors import UnsupportedError

#: Role -> how the ends of keys spell it.
ROLES = {
    "up": r"\.lora_up\.weight|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight"
    r"|\.lora_B(?:\.[^.]+)?\.weight|\.lora_B",
    "down": r"\.lora_down\.weight|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight"
    r"|\.lora_A(?:\.[^.]+)?\.weight|\.lora_A",
    "difference": r"\.diff|\.w_norm",
    "bias": r"\.diff_b|\.b_norm|\.lora_B(?:\.[^.]+)?\.bias",
    **{name: rf"\.{name}" for name in ("alpha", "dora_scale", "lokr_w1", "lokr_w2")},
    **{
        f"{kind}_{factor}": rf"\.{kind}_{factor}"
        for kind in ("hada", "lokr")
        for factor in ("w1_a", "w1_b", "w2_a", "w2_b")
    },
    "refused": r"\.lora_mid\.weight|\.hada_t[12]|\.lokr_t2|\.reshape_weight|\.set_weight"
    r"|\.[ab][12]\.weight|\.oft_blocks(?:\.\d+)?|\.oft_diag|\.oft_R(?:\.[^.]+)?\.weight|\.rescale"
    r"|\.lora_magnitude_vector(?:\.[^.]+)*",
}
#: What to do with a kind that ComfyUI reads, and with one that it leaves out without a word.
_READ = "use KSampler for it, or a LoRA of another kind"
_UNREAD = "use a LoRA of another kind: KSampler does not read it either"
_UNREAD_OFT = "OFT in the form of PEFT or Kohya"
#: End of a key -> the kind of adapter, which is not supported, and what to do instead.
REFUSED = {
    "lora_mid": ("Tucker decomposition of convolutions", _READ),
    "hada_t": ("Tucker decomposition of convolutions", _READ),
    "lokr_t2": ("Tucker decomposition of convolutions", _READ),
    "reshape_weight": ("a control LoRA, which widens the model's input", _READ),
    "set_weight": ("weights that are replaced, as control LoRAs do", _READ),
    "oft_blocks.": (_UNREAD_OFT, _UNREAD),
    "oft_blocks": ("OFT", _READ),
    "oft_": (_UNREAD_OFT, _UNREAD),
    "rescale": ("OFT", _READ),
    "lora_magnitude_vector": ("PEFT's DoRA", _UNREAD),
    "": ("GLoRA", _READ),
}
#: In keys of DiffSynth: the name that PEFT gives an adapter, which its other writers leave out.
DEFAULT = ".lora_B.default."
_ENDS = "|".join(f"(?P<{role}>{pattern})" for role, pattern in ROLES.items())
KEY = re.compile(rf"(?P<stem>.+?)(?:{_ENDS})")
#: What may stand in front of a module's name; the second group is of those who write diffusers' names.
PREFIX = re.compile(
    r"(?:model\.)?(?:diffusion_model\.|lora_unet__?|oft_unet_|Hunyuan_video_I2V_lora_|unet\.|"
    r"(transformer\.|conditional_transformer\.|base_model\.model\.|lora_transformer_|lycoris_))*"
)
#: How keys begin that are for a text encoder.
TEXT_ENCODER = re.compile(r"lora_(?:prior_)?te\d*_|text_encoders?(?:_\d+)?\.")
#: A module, and rows of its weight that a LoRA changes alone (``stem_of_rows``).
ROWS = re.compile(r"(.+)\.rows_(\d{1,9})_(\d{1,9})")
#: Other names of modules: (theirs, diffusers').
ALIASES = (
    ("_linear_in", "_net_0_proj"),
    ("_linear_out", "_net_2"),
    ("_processor_to_", "_to_"),
    ("_to_out", "_to_out_0"),
)
#: Of how many names of a file it is looked whether they are a LoRA's.
SAMPLE = 256
#: Keys that every LoRA of USO (ByteDance, on Flux.1) has, and its names -> ComfyUI's (comfy/lora_convert.py).
USO_KEYS = {"single_blocks.37.processor.qkv_lora.up.weight", "double_blocks.18.processor.qkv_lora2.up.weight"}
USO = {
    ".processor.qkv_lora1.": ".img_attn.qkv.lora_",
    ".processor.qkv_lora2.": ".txt_attn.qkv.lora_",
    ".processor.proj_lora1.": ".img_attn.proj.lora_",
    ".processor.proj_lora2.": ".txt_attn.proj.lora_",
    ".processor.qkv_lora.": ".linear1_qkv.lora_",
    ".processor.proj_lora.": ".linear2.lora_",
}
#: Keys (patterns) that only LoRAs of a kind have -> the kind, and what to do instead.
REFUSED_KEYS = {
    "*.processor.qkv_lora*": (
        "a LoRA of XLabs, whose keys name attention processors",
        "use the nodes that were made",
    ),
    "*single_blocks.0.norm.key_norm.scale": (
        "a control LoRA of Flux.1, which widens the model's input and replaces its norms",
        "use KSampler, or the whole Canny or Depth model",
    ),
}


def is_lora(names: Collection[str]) -> bool:
    """Return whether most tensors of a file, of many a sample, have the names of a LoRA's factors."""
    sample = list(names)[:: 1 + len(names) // SAMPLE]
    return 2 * sum(KEY.fullmatch(name) is not None for name in sample) > len(sample)


def stem_of_rows(module: str, lo: int, hi: int) -> str:
    """Return how this pack spells rows lo..hi of the weight of a ``module``, in files that it writes for its
    ranks: ComfyUI gives queries, keys and values of diffusers' LoRAs as rows of one tensor."""
    return f"{module}.rows_{lo}_{hi}"


def from_uso(key: str) -> str:
    """Return ComfyUI's spelling of a key of USO."""
    return next((key.replace(theirs, ours) for theirs, ours in USO.items() if theirs in key), key)


def check_spelling(name: str, keys: Collection[str]):
    """Refuse the LoRA ``name`` of a kind that its ``keys`` show. Raises UnsupportedError."""
    for pattern, (kind, remedy) in REFUSED_KEYS.items():
        if any(fnmatchcase(key, pattern) for key in keys):
            raise UnsupportedError(f"the LoRA {name} is {kind}; that is not supported: {remedy} for it.")
