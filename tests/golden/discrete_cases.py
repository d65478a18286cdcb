"""Golden cases of models with discrete timesteps."""

from dataclasses import replace

from cases import Case

DISCRETE_CASES = {
    # From its highest noise level, 4519, an Euler step is exact to 3e-4 of the latent's deviation in float32:
    # x holds no more digits there. No other step rounds by more than 1e-6.
    "cogvideox": Case(
        "CogVideoX_T2V",
        {
            "image_model": "cogvideox",
            "num_attention_heads": 4,
            "attention_head_dim": 64,
            "time_embed_dim": 128,
            "num_layers": 8,
            "in_channels": 16,
            "patch_size": 2,
            "text_embed_dim": 64,
            "use_learned_positional_embeddings": False,
            "use_rotary_positional_embeddings": True,
        },
        (1, 16, 3, 16, 16),
        {"cross_attn": (1, 48, 64)},
        settings={"denoise": 0.5},
    ),
}
#: As every whole generation begins: all values of it are to be near ComfyUI's, not each one.
DISCRETE_CASES["cogvideox__from_highest"] = replace(DISCRETE_CASES["cogvideox"], settings={})
