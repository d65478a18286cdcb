"""What LoadParallelDiT and its message Load let choose. Standard library only."""

#: The type of weights and computation; default: as ComfyUI chooses it.
WEIGHT_DTYPES = ("default", "bf16", "fp16", "fp32")
#: How quantized layers multiply; auto: natively where ComfyUI does.
MATMULS = ("auto", "weight only", "native")
