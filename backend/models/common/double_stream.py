"""Names of double-stream blocks in single files of Flux and of the families that took over its layout."""

DOUBLE = "transformer_blocks.{}"
#: The file's module -> diffusers' (key_layout.Layout).
DOUBLE_STREAM = {
    "double_blocks.{}.img_mod.lin": f"{DOUBLE}.norm1.linear",
    "double_blocks.{}.txt_mod.lin": f"{DOUBLE}.norm1_context.linear",
    "double_blocks.{}.img_attn.qkv": f"{DOUBLE}.attn.to_q {DOUBLE}.attn.to_k {DOUBLE}.attn.to_v",
    "double_blocks.{}.txt_attn.qkv": f"{DOUBLE}.attn.add_q_proj {DOUBLE}.attn.add_k_proj "
    f"{DOUBLE}.attn.add_v_proj",
    "double_blocks.{}.img_attn.norm.query_norm.scale": f"{DOUBLE}.attn.norm_q.weight",
    "double_blocks.{}.img_attn.norm.key_norm.scale": f"{DOUBLE}.attn.norm_k.weight",
    "double_blocks.{}.txt_attn.norm.query_norm.scale": f"{DOUBLE}.attn.norm_added_q.weight",
    "double_blocks.{}.txt_attn.norm.key_norm.scale": f"{DOUBLE}.attn.norm_added_k.weight",
    "double_blocks.{}.img_attn.proj": f"{DOUBLE}.attn.to_out.0",
    "double_blocks.{}.txt_attn.proj": f"{DOUBLE}.attn.to_add_out",
    "double_blocks.{}.img_mlp.0": f"{DOUBLE}.ff.net.0.proj",
    "double_blocks.{}.img_mlp.2": f"{DOUBLE}.ff.net.2",
    "double_blocks.{}.txt_mlp.0": f"{DOUBLE}.ff_context.net.0.proj",
    "double_blocks.{}.txt_mlp.2": f"{DOUBLE}.ff_context.net.2",
}
