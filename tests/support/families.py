"""The golden cases of every family as requests: ComfyUI's latent formats, and its model arguments from a
CONDITIONING."""

import inspect
import json
import math

import torch
from diffusers import AutoencoderKLQwenImage21, AutoencoderKLWan
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import GOLDEN

from backend.models import FAMILIES
from backend.protocol import ModelCall, Sample


def vae_numbers(vae: type, *shape: int) -> list[torch.Tensor]:
    """Mean and deviation of each channel that a VAE of diffusers has by default."""
    defaults = inspect.signature(vae).parameters
    return [torch.tensor(defaults[name].default).view(shape) for name in ("latents_mean", "latents_std")]


#: ComfyUI's latent formats: model space = (VAE units - shift) * scale.
WAN_MEAN, WAN_STD = vae_numbers(AutoencoderKLWan, 1, 16, 1, 1, 1)
WAN = (WAN_MEAN, 1.0 / WAN_STD)
FLUX = (0.1159, 0.3611)
MEAN, DEVIATION = vae_numbers(AutoencoderKLQwenImage21, 1, 64, 1, 1)
QWEN21 = (MEAN, 1.0 / DEVIATION)
#: Golden family -> (shift, scale).
LATENT_FORMATS = {
    "flux-dev": FLUX,
    "sd3": (0.0609, 1.5305),
    "wan21-t2v": WAN,
    "wan21-vace": WAN,
    "hunyuan-video": (0.0, 0.476986),
    "qwen-image": WAN,
    "ltxv": (0.0, 1.0),
    "pixart-sigma": (0.0, 0.13025),
    "cogvideox": (0.0, 1.15258426),
    "z-image-turbo": FLUX,
    "chroma": FLUX,
    "hunyuan-dit": (0.0, 0.13025),
    "krea2": WAN,
    "hunyuan-video15": (0.0, 1.03682),
    "hunyuan-image21": (0.0, 0.75289),
    "kandinsky5": (0.0, 0.476986),
    "kandinsky5-image": FLUX,
    "hidream": FLUX,
    "sana": (0.0, 0.41407),
    "minimax-h3": (0.0, 1.0),
    "minimax-h3-curves": (0.0, 1.0),
    "flux2-dev": (0.0, 1.0),
    "lumina2": FLUX,
    "ideogram4": (0.0, 1.0),
    "qwen-image21": QWEN21,
    "flux3": (0.0, 1.0),
    "ltx2": (0.0, 1.0),
    "ltx23": (0.0, 1.0),
}
#: Golden family -> factor of every latent where there are several: ComfyUI's solvers step MiniMax-H3's audio
#: on the video's schedule.
STREAMS = {"ltx2": (1.0, 1.0), "ltx23": (1.0, 1.0), "minimax-h3": (1.0, 4.0), "minimax-h3-curves": (1.0, 4.0)}
#: Forms of a model that diffusers does not have.
FILES_ALONE = ("minimax-h3-curves",)
#: Key of a CONDITIONING -> ComfyUI's model argument, where they differ.
ARGUMENTS = {
    "cross_attn": "c_crossattn",
    "pooled_output": "y",
    "conditioning_byt5small": "txt_byt5",
    "conditioning_mt5xl": "encoder_hidden_states_t5",
    "conditioning_llama3": "encoder_hidden_states_llama3",
    "attention_mask_mt5xl": "text_embedding_mask_t5",
}


def left_padded(prompt: torch.Tensor, rows: int = 512) -> torch.Tensor:
    """ComfyUI's prompt of Flux.2: zeros in front, up to this many rows."""
    return torch.nn.functional.pad(prompt, (0, 0, rows - prompt.shape[1], 0))


def no_control() -> dict[str, torch.Tensor]:
    """ComfyUI's control video of Wan VACE where none is given: grey ones that are to be painted anew."""
    frames = ((torch.zeros(1, 16, 3, 16, 16) - WAN_MEAN) / WAN_STD).repeat(1, 2, 1, 1, 1)
    context = torch.cat([frames, torch.ones(1, 64, 3, 16, 16)], dim=1)[:, None]
    return {"vace_context": context, "vace_strength": torch.ones(1, 1)}


#: Golden family -> what else ComfyUI's model makes of a CONDITIONING (arguments -> further arguments).
FURTHER = {
    "hunyuan-dit": lambda a: {
        "text_embedding_mask": a.pop("attention_mask"),
        "image_meta_size": torch.tensor([[320.0, 320.0, 320.0, 320.0, 0.0, 0.0]]),
    },
    "z-image-turbo": lambda a: {"num_tokens": a.pop("attention_mask").sum()},
    "pixart-sigma": lambda a: {"c_size": torch.tensor([[320.0, 320.0]]), "c_ar": torch.ones(1, 1)},
    "wan21-vace": lambda a: no_control(),
    "chroma": lambda a: {"guidance": torch.zeros(1)},
    "kandinsky5": lambda a: {"c_concat": torch.zeros(1, 17, 3, 12, 16)},
    "flux2-dev": lambda a: {"c_crossattn": left_padded(a["c_crossattn"])},
    "lumina2": lambda a: {"num_tokens": a.pop("attention_mask").sum()},
    "ltx2": lambda a: a.pop("unprocessed_ltxav_embeds") and {"frame_rate": torch.tensor(25)},
    "ltx23": lambda a: {"frame_rate": torch.tensor(25)},
    "hunyuan-video15": lambda a: {"guidance": torch.full((1,), 6.0)},
    "hunyuan-image21": lambda a: {"guidance": torch.full((1,), 6.0)},
}
#: Golden family -> distance in standard deviations that is accepted, where it is not 1e-4: attention of
#: random weights is sharp there, which makes float32 rounding large. ComfyUI's latents come from a CPU with
#: AVX-512; with the kernels of AVX2 (MKL_CBWR) Flux is up to 1.1e-4 away, HunyuanVideo 1.0e-4 and Krea 2,
#: whose norms multiply by 1 + weight, 2.4e-4. After the first step ComfyUI's latent of Krea 2 is 4.9e-5 from
#: one computed in float64, ours 2.7e-5.
TOLERANCES = {"flux-dev": 2e-4, "hunyuan-video": 2e-4, "krea2": 4e-4}
#: Case from a noise level at which float32 rounds single values by more than that (golden/discrete_cases.py):
#: compared by its root mean square.
FROM_HIGHEST = "cogvideox__from_highest"
CASES = sorted(
    path.stem
    for path in GOLDEN.glob("*__*.safetensors")
    if path.stem != FROM_HIGHEST
    and path.stem.split("__")[0] in LATENT_FORMATS
    and not path.stem.startswith("flux-dev")
)


def golden(name: str, model: str = "tiny") -> tuple[Sample, torch.Tensor]:
    """The request of a case FAMILY__CASE, and the LATENT that ComfyUI returned for it (VAE units)."""
    family = name.split("__")[0]
    stored, shapes = load(name)
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        args = json.loads(file.metadata()["args"])
    tensors = {
        "noise": stored["noise"],
        "latent": to_model_space(family, stored["latent"], shapes),
        "sigmas": stored["sigmas"],
    }
    if "noise_mask" in stored:
        mask = stored["noise_mask"]
        tensors["denoise_mask"] = mask.unsqueeze(2) if mask.ndim < stored["noise"].ndim else mask
    for branch in ("positive", "negative")[: 1 if args["cfg"] == 1.0 else 2]:
        tensors |= {f"{branch}.{key}": value for key, value in arguments(family, stored, branch).items()}
    return Sample(
        model, args["sampler"], args["cfg"], args["seed"], latent_shapes=shapes, tensors=tensors
    ), stored["samples"]


def load(name: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """The tensors of a case; several latents packed as ComfyUI packs them, (B, 1, L), and their shapes (empty
    where there is one)."""
    stored = load_file(GOLDEN / f"{name}.safetensors")
    shapes = [list(stored[f"noise.{i}"].shape[1:]) for i in range(len(STREAMS.get(name.split("__")[0], ())))]
    for whole in {key[:-2] for key in stored if key.endswith(".0") and shapes}:
        stored[whole] = torch.cat(
            [stored.pop(f"{whole}.{i}").flatten(1)[:, None] for i in range(len(shapes))], dim=2
        )
    return stored, shapes


def _scale(family: str, shapes: list):
    if not shapes:
        return LATENT_FORMATS[family][1]
    return torch.cat(
        [torch.full((math.prod(shape),), factor) for shape, factor in zip(shapes, STREAMS[family])]
    )


def model_call(sample: Sample, family: str, batch: int) -> ModelCall:
    """One call of the model ``family`` (a name of the backend's) with ``batch`` rows, each at a time of its
    own unless its latents share one; the prompts of a request take turns where they are alike, else all rows
    have the positive one."""
    x = torch.randn(batch, *sample.tensors["noise"].shape[1:], generator=torch.Generator().manual_seed(batch))
    times, turns = (
        torch.linspace(0.9, 0.9 if sample.latent_shapes else 0.2, batch),
        [row % 2 for row in range(batch)],
    )
    conditioning = {}
    for key in (key.removeprefix("positive.") for key in sample.tensors if key.startswith("positive.")):
        positive, negative = sample.tensors[f"positive.{key}"], sample.tensors.get(f"negative.{key}")
        alike = positive.ndim and negative is not None and positive.shape == negative.shape
        conditioning[f"cond.{key}"] = torch.cat([positive, negative])[turns] if alike else positive
    return ModelCall(
        sample.model,
        latent_shapes=sample.latent_shapes,
        tensors={
            "x": x,
            "time": times if FAMILIES[family].noise.schedule is None else (1000 * times).round(),
            **conditioning,
        },
    )


def arguments(family: str, stored: dict, branch: str) -> dict[str, torch.Tensor]:
    """The model arguments that ComfyUI makes of a CONDITIONING."""
    values = {
        key.removeprefix(f"{branch}."): value for key, value in stored.items() if key.startswith(f"{branch}.")
    }
    values = {
        ARGUMENTS.get(key, key): value.reshape(1) if key == "guidance" else value
        for key, value in values.items()
    }
    further = FURTHER[family](values) if family in FURTHER else {}
    return values | further


def to_model_space(family: str, latent: torch.Tensor, shapes: list | tuple = ()) -> torch.Tensor:
    """ComfyUI's process_in; an empty latent stays empty. ``shapes``: of the latents, where there are
    several."""
    shift, scale = LATENT_FORMATS[family][0], _scale(family, shapes)
    return (latent - shift) * scale if latent.any() else latent


def to_vae_units(family: str, samples: torch.Tensor, shapes: list | tuple = ()) -> torch.Tensor:
    """ComfyUI's process_out."""
    shift, scale = LATENT_FORMATS[family][0], _scale(family, shapes)
    return samples / scale + shift
