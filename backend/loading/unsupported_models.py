"""Models and formats that are not supported, known by tensors that only they have, so that a refusal says
what the file is. No file of a supported family matches."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import UnsupportedError, some
from ..models.family import Family
from ..models.key_layout import ALWAYS_UNREAD, PREFIXES, Shapes
from ..models.patterns import matches
from .lora.lora_spellings import is_lora

KSAMPLER = "sample it with KSampler"
OTHER_NODES = "use the nodes that were made for it"
STOCK = "use ComfyUI's own nodes for it"
FOLDER = "choose the folder of its diffusers pipeline, with config.json"


@dataclass(frozen=True)
class UnsupportedModel:
    """A model that is not supported: ``keys`` that its files have, under one prefix, and ``absent`` ones.

    sizes: key -> (axis, size) that tells it from its relatives. remedy: what to do instead.
    """

    name: str
    keys: tuple[str, ...]
    remedy: str = KSAMPLER
    absent: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def matches(self, prefix: str, shapes: Shapes) -> bool:
        """Return whether this is the model whose tensors have ``shapes``, under ``prefix``."""
        if any(prefix + key not in shapes for key in (*self.keys, *self.sizes)):
            return False
        if any(prefix + key in shapes for key in self.absent):
            return False
        return all(
            shapes[prefix + key][axis : axis + 1] == (size,) for key, (axis, size) in self.sizes.items()
        )


UNET = "input_blocks.0.0.weight"
FLUX_BLOCKS = ("img_in.weight", "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")
DIFFUSERS_FLUX = (
    "time_embed.timestep_embedder.linear_1.weight",
    "single_transformer_blocks.0.proj_mlp.weight",
)
#: The first that matches counts.
UNSUPPORTED = (
    UnsupportedModel("a ControlNet", ("controlnet_blocks.0.weight",), STOCK),
    UnsupportedModel("a ControlNet", ("controlnet_x_embedder.weight",), STOCK),
    UnsupportedModel("a ControlNet", ("control_model.input_hint_block.0.weight",), STOCK),
    UnsupportedModel("a ControlNet", ("input_hint_block.0.weight",), STOCK),
    UnsupportedModel("a ControlNet", ("controlnet_cond_embedding.conv_in.weight",), STOCK),
    # UNets, told apart by the widths of what they read
    UnsupportedModel(
        "Stable Video Diffusion or SV3D, a UNet", (UNET, "input_blocks.1.1.time_stack.0.attn1.to_q.weight")
    ),
    UnsupportedModel("Stable Diffusion XL, a UNet", (UNET,), sizes={"label_emb.0.0.weight": (1, 2816)}),
    UnsupportedModel(
        "the refiner of Stable Diffusion XL, a UNet", (UNET,), sizes={"label_emb.0.0.weight": (1, 2560)}
    ),
    UnsupportedModel("the upscaler of Stable Diffusion 2, a UNet", (UNET,), sizes={UNET: (1, 7)}),
    UnsupportedModel(
        "Stable Diffusion 2, a UNet",
        (UNET,),
        sizes={"input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (1, 1024)},
    ),
    UnsupportedModel("Stable Diffusion, a UNet", (UNET,)),
    UnsupportedModel(
        "a UNet with diffusers' names",
        ("down_blocks.0.resnets.0.conv1.weight", "time_embedding.linear_1.weight"),
    ),
    UnsupportedModel("Stable Cascade (stage C)", ("clf.1.weight", "clip_txt_mapper.weight")),
    UnsupportedModel("Stable Cascade (stage B)", ("clf.1.weight", "clip_mapper.weight")),
    # relatives of Flux
    UnsupportedModel("Ovis-Image", ("double_blocks.0.img_mlp.gate_proj.weight", "txt_norm.weight")),
    UnsupportedModel(
        "LongCat-Image",
        FLUX_BLOCKS,
        absent=("vector_in.in_layer.weight",),
        sizes={"txt_in.weight": (1, 3584)},
    ),
    UnsupportedModel("LongCat-Image", DIFFUSERS_FLUX, FOLDER, sizes={"context_embedder.weight": (1, 3584)}),
    UnsupportedModel(  # its pipeline computes img_ids, so its folder is refused too
        "Bria",
        DIFFUSERS_FLUX,
        "use diffusers' own pipeline for it",
        sizes={"context_embedder.weight": (1, 4096)},
    ),
    UnsupportedModel(
        "Ovis-Image", ("context_embedder_norm.weight", "timestep_embedder.linear_1.weight"), FOLDER
    ),
    UnsupportedModel("Chroma Radiance, a Chroma that works on pixels", ("img_in_patch.weight",)),
    UnsupportedModel("JoyImage", ("double_blocks.0.attn.img_attn_qkv.weight",)),
    UnsupportedModel("Hunyuan3D 2", ("latent_in.weight", "cond_in.weight"), STOCK),
    # relatives of Qwen-Image
    UnsupportedModel("Lens", ("transformer_blocks.0.img_mlp.w1.weight", "img_in.weight")),
    UnsupportedModel(
        "Mage-Flow", ("img_in.weight",), sizes={"txt_norm.weight": (0, 2560), "proj_out.weight": (0, 128)}
    ),
    UnsupportedModel("Qwen-Image 2.1 Fun Control", ("control_img_in.weight", "modulation.1.weight")),
    # relatives of Lumina 2
    UnsupportedModel("Z-Image Omni", ("siglip_embedder.0.weight",)),
    UnsupportedModel("Z-Image in pixels", ("dec_net.cond_embed.weight",)),
    UnsupportedModel("NewBie", ("clip_text_pooled_proj.0.weight",)),
    UnsupportedModel("Boogu-Image", ("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight",)),
    UnsupportedModel("OmniGen2", ("ref_image_patch_embedder.weight", "image_index_embedding")),
    # relatives of HunyuanVideo
    UnsupportedModel("FramePack", ("clean_x_embedder.proj.weight",), OTHER_NODES),
    UnsupportedModel(
        "the refiner of HunyuanImage 2.1, which is given an image",
        ("txt_in.individual_token_refiner.blocks.0.norm1.weight",),
        absent=("vector_in.in_layer.weight", "vision_in.proj.0.weight"),
        sizes={"img_in.proj.weight": (4, 1)},
    ),
    # relatives of Wan
    UnsupportedModel(
        "SkyReels-V2 diffusion forcing", ("fps_embedding.weight", "fps_projection.0.weight"), OTHER_NODES
    ),
    UnsupportedModel(
        "SkyReels-V2 diffusion forcing",
        ("model_type.SkyReels-V2-DF-14B-720P", "patch_embedding.weight"),
        OTHER_NODES,
    ),
    UnsupportedModel(
        "ReCamMaster, a Wan that follows a camera", ("blocks.0.cam_encoder.weight",), OTHER_NODES
    ),
    UnsupportedModel("SCAIL 2, a Wan that follows poses", ("patch_embedding_mask.weight",)),
    UnsupportedModel("SCAIL", ("patch_embedding_pose.weight",)),
    UnsupportedModel("HuMo", ("audio_proj.audio_proj_glob_1.layer.weight",)),
    UnsupportedModel("Wan 2.2 S2V", ("casual_audio_encoder.encoder.final_linear.weight",)),
    UnsupportedModel("WanDancer", ("patch_embedding_global.weight",)),
    UnsupportedModel(
        "Wan Animate",
        ("pose_patch_embedding.weight",),
        absent=("face_adapter.fuser_blocks.0.k_norm.weight", "face_adapter.0.norm_k.weight"),  # the whole
    ),
    # relatives of CogVideoX
    UnsupportedModel(
        "ConsisID, which is given a face",
        ("local_facial_extractor.proj_out", "perceiver_cross_attention.0.to_q.weight"),
        OTHER_NODES,
    ),
    # relatives of PixArt
    UnsupportedModel(  # for which diffusers has no class
        "PixArt-Sigma with KV compression",
        ("t_block.1.weight", "blocks.14.attn.sr.weight"),
        "use a file without KV compression",
    ),
    UnsupportedModel(
        "SANA with NVIDIA's own names",
        ("attention_y_norm.weight", "blocks.0.mlp.depth_conv.conv.weight"),
        "use diffusers' file or folder of it",
    ),
    # others that ComfyUI runs
    UnsupportedModel("AuraFlow", ("double_layers.0.attn.w1q.weight",)),
    UnsupportedModel("Mochi", ("t5_yproj.weight",)),
    UnsupportedModel("Mochi", ("pos_frequencies", "transformer_blocks.0.norm1.linear.weight"), FOLDER),
    UnsupportedModel("Stable Audio", ("transformer.rotary_pos_emb.inv_freq",), STOCK),
    UnsupportedModel("Cosmos", ("blocks.block0.blocks.0.block.attn.to_q.0.weight",)),
    UnsupportedModel("Anima", ("llm_adapter.blocks.0.cross_attn.q_proj.weight",)),
    UnsupportedModel("Cosmos Predict 2", ("blocks.0.mlp.layer1.weight",)),
    UnsupportedModel("PiD, a decoder", ("lq_proj.latent_proj.0.weight",), STOCK),
    UnsupportedModel("PixelDiT", ("core.pixel_embedder.proj.weight",)),
    UnsupportedModel("SeedVR2", ("vid_in.proj.weight",), STOCK),
    UnsupportedModel("SeedVR2", ("blocks.31.mlp.all.proj_in_gate.weight",), STOCK),
    UnsupportedModel("SeedVR2", ("blocks.35.mlp.vid.proj_out.weight",), STOCK),
    UnsupportedModel(
        "Hunyuan3D 2.1",
        ("t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight"),
        STOCK,
        absent=("mlp_t5.0.weight",),  # HunyuanDiT
    ),
    UnsupportedModel("TripoSplat", ("cam_out_layer.weight", "repo_layers.0.final_map.weight"), STOCK),
    UnsupportedModel("Trellis 2", ("img2shape.t_embedder.mlp.0.weight",), STOCK),
    UnsupportedModel("Trellis 2", ("shape2txt.t_embedder.mlp.0.weight",), STOCK),
    UnsupportedModel("HiDream O1", ("t_embedder1.mlp.0.weight", "x_embedder.proj1.weight")),
    UnsupportedModel("ACE-Step", ("genre_embedder.weight",), STOCK),
    UnsupportedModel("ACE-Step 1.5", ("encoder.lyric_encoder.layers.0.input_layernorm.weight",), STOCK),
    UnsupportedModel("MiniMax Music 3", ("cond_layer_logits", "latent_conditioners.0.weight"), STOCK),
    UnsupportedModel("ERNIE-Image", ("layers.0.mlp.linear_fc2.weight",)),
    UnsupportedModel("RT-DETR 4, a detector", ("encoder.pan_blocks.1.cv4.conv.weight",), STOCK),
    UnsupportedModel(
        "SAM 3, a model of masks",
        ("detector.backbone.vision_backbone.trunk.blocks.0.attn.qkv.weight",),
        STOCK,
    ),
    UnsupportedModel("Depth Anything 3", ("backbone.embeddings.patch_embeddings.projection.weight",), STOCK),
)
OTHER_QUANTIZATION = "use a bf16, fp16, fp8, int8, mxfp8, nvfp4 or GGUF file of this model"
#: End of a name that only a format has -> how the file is quantized.
UNSUPPORTED_FORMATS = {
    "bitsandbytes__nf4": "as nf4 (bitsandbytes)",
    "bitsandbytes__fp4": "as fp4 (bitsandbytes)",
    "SCB": "as int8 by bitsandbytes",
    "wscales": "for Nunchaku (SVDQuant)",
    "_data": "by quanto, as for Wan2GP",
    "qzeros": "as GPTQ or AWQ",
}


def check_supported(name: str, shapes: Shapes):
    """Refuse a file of a known model or format that is not supported. Raises UnsupportedError."""
    check_format(name, shapes)
    for known in UNSUPPORTED:
        if any(known.matches(prefix, shapes) for prefix in PREFIXES):
            raise UnsupportedError(f"{name} is {known.name}, which is not supported; {known.remedy}.")


def check_format(name: str, shapes: Shapes):
    """Refuse a quantization or a kind of file that no family can be read from. Raises UnsupportedError."""
    if is_lora(shapes):
        raise UnsupportedError(
            f"{name} is a LoRA, which changes a transformer and is none; put it into models/loras and "
            f"add it with Parallel LoRA, to the model that it was made for."
        )
    for end, how in UNSUPPORTED_FORMATS.items():
        if any(key.endswith(f".{end}") for key in shapes):
            what = f"{name} is quantized {how}, which is not supported"
            raise UnsupportedError(f"{what}; {OTHER_QUANTIZATION}.")


def check_unread(name: str, family: Family, unread: Mapping[str, str]):
    """Refuse unread tensors (the layout's name -> the file's) of no known reason. Raises UnsupportedError."""
    allowed = (*ALWAYS_UNREAD, *family.layout.unread)
    rest = [key for ours, key in unread.items() if not matches(ours, allowed)]
    if rest:
        raise UnsupportedError(
            f"{name} has {len(rest)} tensors that {family.name} does not read, first {some(rest, 3)}; it is "
            f"another model, or a variant that is not supported. Use a file of {family.name}, or KSampler."
        )
