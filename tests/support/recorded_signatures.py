"""Signatures of what is called of other packages, as the sources of one version have them, and stand-ins
with exactly these. A test compares them with the packages that are installed."""

import importlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """A function: its package and version, the module that has it, its name, its parameters without types."""

    version: str
    module: str
    function: str
    parameters: str

    @property
    def package(self) -> str:
        return self.version.partition(" ")[0]

    @property
    def signature(self) -> inspect.Signature:
        """The recorded signature; only of one whose defaults are literals."""
        return inspect.signature(eval(f"lambda {self.parameters}: None"))

    def installed(self) -> str:
        """Return the parameters that the installed package has. Raises ImportError where there is none."""
        return parameters_of(getattr(importlib.import_module(self.module), self.function))


def parameters_of(function: Callable) -> str:
    """Return names, order, kinds and defaults of a function's parameters."""
    signature = inspect.signature(function)
    untyped = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    # torch prints its enumerations as <_ScalingType.TensorWise: 0>; before 2.10 comfy-kitchen has texts
    return re.sub(r"<\w+\.(\w+): \d+>", r"'\1'", str(inspect.Signature(untyped))[1:-1])


def stand_in(recorded: Recorded, body: Callable, results: object = inspect.Signature.empty) -> Callable:
    """Return a function with the recorded signature that calls ``body`` with the parameters that it names;
    those that it does not name must have their defaults. ``results``: the annotation of what it returns."""
    signature = recorded.signature.replace(return_annotation=results)
    named = inspect.signature(body).parameters

    def call(*given, **options):
        bound = signature.bind(*given, **options)  # raises TypeError as the package would
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name not in named:
                default = signature.parameters[name].default
                # of **kwargs, which have none, there must be none
                assert value == ({} if default is inspect.Parameter.empty else default), name
        return body(**{name: bound.arguments[name] for name in named})

    call.__signature__ = signature
    return call


#: Attention packages. None is installed for the tests; where one is, it is compared too.
FLASH_ATTN = Recorded(
    "flash-attn 2.8.3.post1",
    "flash_attn",
    "flash_attn_func",
    "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False",
)
#: Of the commit 0251105a of github.com/Dao-AILab/flash-attention, its folder hopper. torch calls the
#: operators below by position.
FLASH_ATTN_3 = Recorded(
    "flash-attn-3 0251105a",
    "flash_attn_interface",
    "flash_attn_func",
    "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
)
#: hopper/flash_api.cpp, the same in 2.8.3.post1 and the commit above.
FLASH_ATTN_3_SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, "
    "int? max_seqlen_q = None, int? max_seqlen_k = None, Tensor? page_table = None, "
    "Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, Tensor? rotary_cos = None, "
    "Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, "
    "bool is_causal = False, int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, "
    "float softcap = 0.0, bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
_FLASH_ATTN_4 = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, "
    "causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None, "
    "tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, "
    "_arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
    "lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, "
    "gather_kv_indices=None"
)
#: The newest, which returns five results, and the last that returns two.
FLASH_ATTN_4 = Recorded(
    "flash-attn-4 4.0.0b36",
    "flash_attn.cute.interface",
    "_flash_attn_fwd",
    _FLASH_ATTN_4 + ", scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
    "gather_bwd_recompute_p=False",
)
FLASH_ATTN_4_OF_TWO = Recorded(
    "flash-attn-4 4.0.0b18", "flash_attn.cute.interface", "_flash_attn_fwd", _FLASH_ATTN_4
)
#: FlashAttention 2 has an early FlashAttention 4 among its files.
FLASH_ATTN_4_OF_2 = Recorded(
    "flash-attn 2.8.3.post1",
    "flash_attn.cute.interface",
    "_flash_attn_fwd",
    "q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, page_table=None, "
    "softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None, "
    "learnable_sink=None, m_block_size=128, n_block_size=128, num_threads=384, pack_gqa=None, "
    "_compute_capability=None",
)
#: The same at the tag v2.2.0 and at the later commit d1a57a54 of github.com/thu-ml/SageAttention, which
#: calls itself 2.2.0 too.
SAGE = Recorded(
    "sageattention 2.2.0",
    "sageattention",
    "sageattn",
    "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, return_lse=False, **kwargs",
)
SAGE_ON_8_0 = Recorded(
    "sageattention 2.2.0",
    "sageattention",
    "sageattn_qk_int8_pv_fp16_cuda",
    "q, k, v, tensor_layout='HND', is_causal=False, qk_quant_gran='per_thread', sm_scale=None, "
    "pv_accum_dtype='fp32', smooth_k=True, smooth_v=False, return_lse=False, **kwargs",
)
SAGE_1 = Recorded(
    "sageattention 1.0.6",
    "sageattention",
    "sageattn",
    "q, k, v, tensor_layout='HND', is_causal=False, sm_scale=None, smooth_k=True, **kwargs",
)
SAGE_3 = Recorded(
    "sageattn3 1.0.0",
    "sageattn3",
    "sageattn3_blackwell",
    "q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs",
)

#: What rings call, of yunchang/ring/utils.py, and what native products call.
YUNCHANG = Recorded(
    "yunchang 0.6.4",
    "yunchang.ring.utils",
    "update_out_and_lse",
    "out, lse, block_out, block_lse, slice_=None",
)
COMFY_KITCHEN = [
    Recorded("comfy-kitchen 0.2.40", module, function, parameters)
    for module, functions in {
        "comfy_kitchen": {
            "int8_linear": "x, weight, weight_scale, bias=None, out_dtype=None, convrot=False, "
            "convrot_groupsize=256, input_act=None, input_act_weight=None, input_act_eps=0.0, residual=None, "
            "residual_scale=None",
            "mm_int8": "a, b",
            "quantize_int8_rowwise": "x, stochastic_rounding=0",
            "quantize_per_tensor_fp8": "x, scale, output_type=torch.float8_e4m3fn",
            "to_blocked": "input_matrix, flatten=True",
            "quantize_mxfp8": "x, pad_32x=False",
            "dequantize_mxfp8": "qx, block_scales, output_type=torch.bfloat16",
            "scaled_mm_mxfp8": "a, b, block_scale_a, block_scale_b, bias=None, out_dtype=None",
            "quantize_nvfp4": "x, per_tensor_scale, epsilon=0.0, pad_16x=False, hi_first=True",
            "dequantize_nvfp4": "qx, per_tensor_scale, block_scales, output_type=torch.bfloat16, "
            "hi_first=True",
            "scaled_mm_nvfp4": "a, b, tensor_scale_a, tensor_scale_b, block_scale_a, block_scale_b, "
            "bias=None, out_dtype=None, alpha=None",
            "list_backends": "",
            "disable_backend": "name",
        },
        "comfy_kitchen.scaled_mm_v2": {
            "scaled_mm_v2": "input, weight, scale_a, scale_b, bias=None, out_dtype=None, "
            "scale_recipe_a='TensorWise', scale_recipe_b='TensorWise', swizzle_a='NO_SWIZZLE', "
            "swizzle_b='NO_SWIZZLE'",
        },
        "comfy_kitchen.backends.cuda": {
            "_int4_linear_via_int8_values": "x_int8, weight_int8, x_scale, weight_scale, bias, out_dtype"
        },
    }.items()
    for function, parameters in functions.items()
]
