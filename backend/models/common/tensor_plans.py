"""Names that diffusers' attention and MLP modules share: tensor-parallel plans (styles: see
parallel/tensor_parallel.py), layers of text."""

QKV = ("to_q", "to_k", "to_v", "to_gate", "add_q_proj", "add_k_proj", "add_v_proj")
MLP = ("net.0.proj", "feed_forward.w1", "feed_forward.w3", "ff.gate", "ff.up")
ROWWISE = ("to_out.0", "to_add_out", "net.2", "feed_forward.w2", "ff.down")
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
#: Attention and MLP of most classes; a family takes it as it is, or adds to it.
COMMON = {
    **{f"*.{name}": "colwise" for name in (*QKV, *MLP)},
    **{f"*.{name}": "rowwise" for name in ROWWISE},
    **{f"*.{name}": "norm" for name in NORMS},
}
#: Blocks with attention and MLP side by side and one output layer after both, as Flux's single ones.
PARALLEL_MLP = {
    "single_transformer_blocks.*.proj_mlp": "colwise",
    "single_transformer_blocks.*.proj_out": "rowwise after attention",
}
#: Layers that diffusers' double blocks have for text alone (Blocks.text_layers).
TEXT_LAYERS = ("attn.add_*", "attn.to_add_out", "ff_context*", "norm1_context*")
