"""What the names that diffusers' attention and feed-forward modules share tell: tensor-parallel plans
(styles: see parallel/tensor_parallel.py), layers of text."""

#: Attention and MLP of classes without a _tp_plan of their own; a family takes it as it is, or adds to it.
COMMON = {
    **{
        f"*.{name}": "colwise"
        for name in ("to_q", "to_k", "to_v", "to_gate", "add_q_proj", "add_k_proj", "add_v_proj")
    },
    **{f"*.{name}": "rowwise" for name in ("to_out.0", "to_add_out")},
    **{f"*.{name}": "norm" for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")},
    "*.net.0.proj": "colwise",
    "*.net.2": "rowwise",
    **{
        f"*.feed_forward.{name}": style
        for name, style in (("w1", "colwise"), ("w3", "colwise"), ("w2", "rowwise"))
    },
    **{
        f"*.ff.{name}": style for name, style in (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))
    },
}
#: Blocks with attention and MLP side by side and one output layer after both, as Flux's single ones.
PARALLEL_MLP = {
    "single_transformer_blocks.*.proj_mlp": "colwise",
    "single_transformer_blocks.*.proj_out": "rowwise behind attention",
}
#: Layers that diffusers' double blocks have for text alone (Blocks.text_layers).
TEXT_LAYERS = ("attn.add_*", "attn.to_add_out", "ff_context*", "norm1_context*")
