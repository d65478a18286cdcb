"""Published latencies of parallel diffusion transformers, as data: what the planner's order is compared with.

Sources, by the letter of each row: X xDiT docs/performance and the figures of xdit_assets; P PipeFusion,
arXiv 2405.14430; C cache-dit docs; A ParaAttention README; D diffusers' page on distributed inference; T
TensorRT-LLM tech blog 25; R xDiT pull request 788; S SGLang's Step-Video; L raylight. Models are given by
their published sizes, machines by data sheets and by what the sources say of their links (all-to-all of
8 L40 over two sockets). What is left out is in LEFT_OUT, with the reason.
"""

from dataclasses import dataclass, replace

from backend.config import ParallelConfig
from backend.planner.cost import Cost
from backend.planner.machine import Machine, RequestEstimate
from backend.planner.model_shape import NONE, Activations, BlockShape, ModelShape

BF16 = 2
G, T = 1e9, 1e12
NAMES = {
    "cfg": "cfg_degree",
    "pp": "pipefusion_degree",
    "u": "ulysses_degree",
    "r": "ring_degree",
    "tp": "tensor_parallel_degree",
}


def double(d: int, adaln: int = 12) -> BlockShape:
    """A block with layers of its own for text and image, of width ``d``."""
    return BlockShape(
        image=12 * d * d,
        text=12 * d * d,
        image_pairs=2 * d,
        cross_pairs=4 * d,
        text_pairs=2 * d,
        weights=24 * d * d * BF16,
        modulation=adaln * d * d * BF16,
        reduced_image=2 * d,
        reduced_text=2 * d,
        streams=2,
    )


def single(d: int, adaln: int = 3) -> BlockShape:
    """A block whose layers take text and image in one sequence."""
    return replace(
        double(d),
        weights=12 * d * d * BF16,
        modulation=adaln * d * d * BF16,
        reduced_image=d,
        reduced_text=d,
        streams=1,
    )


def crossed(d: int, matrices: float) -> BlockShape:
    """A block of self-attention over the image and attention to the prompt, ``matrices`` x d x d."""
    return BlockShape(
        image=matrices * d * d,
        text=0,
        image_pairs=2 * d,
        cross_pairs=2 * d,
        text_pairs=0,
        weights=round((matrices + 2) * d * d * BF16),
        reduced_image=3 * d,
    )


def model(name: str, d: int, heads: int, blocks: list[BlockShape], joint: bool = True) -> ModelShape:
    """A transformer of width ``d``."""
    return ModelShape(
        name=name,
        family=name,
        blocks=tuple(blocks),
        rest=60_000_000,
        heads=heads,
        head_size=d // heads,
        width=d,
        itemsize=BF16,
        joint=joint,
        activations=Activations(*(width * d * BF16 for width in (5, 10, 8, 2, 3)), buffered=8 * d * BF16),
    )


FLUX = model("flux", 3072, 24, [double(3072)] * 19 + [single(3072)] * 38)
FLUX2 = model("flux2", 6144, 48, [double(6144, 0)] * 8 + [single(6144, 0)] * 48)
SD3 = model("sd3-medium", 1536, 24, [double(1536)] * 24)
QWEN = model("qwen-image", 3072, 24, [double(3072)] * 60)
HUNYUAN = model("hunyuan-video", 3072, 24, [double(3072)] * 20 + [single(3072)] * 40)
COG = model("cogvideox-5b", 3072, 48, [single(3072, 12)] * 42)
CONSISID = replace(COG, name="consisid")  # its layers for faces are in what one GPU takes
CHROMA = replace(FLUX, name="chroma")
STEP = model("step-video", 6144, 48, [crossed(6144, 12)] * 48, joint=False)
WAN = model("wan-14b", 5120, 40, [crossed(5120, 6 + 2 * 13824 / 5120)] * 40, joint=False)
# linear attention: no pairs of tokens, and no rank sends any; the blocks' convolutions as products
SANA_BLOCK = replace(crossed(2240, 13.5), image_pairs=0.0, queries=NONE, keys=NONE)
SANA = model("sana", 2240, 70, [SANA_BLOCK] * 20, joint=False)
PIXART = model("pixart", 1152, 16, [crossed(1152, 14)] * 28, joint=False)

L40 = Machine(
    *("L40", 120 * T, 110 * T, 0.8 * T, 20 * G, {2: 17 * G, 4: 2.8 * G, 8: 0.8 * G}),
    launch=9e-4,
    overhead=7e-4,
)
L20 = Machine(*("L20", 95 * T, 85 * T, 0.8 * T, 18 * G, {2: 19 * G, 4: 16 * G, 8: 7 * G}), launch=5e-4)
RTX4090 = Machine(*("4090", 150 * T, 140 * T, 0.95 * T, 11 * G, {2: 10 * G, 4: 8 * G}), launch=5e-4)
NVLINK = {2: 160 * G, 4: 160 * G, 8: 160 * G}
A100 = Machine(*("A100", 185 * T, 160 * T, 1.6 * T, 200 * G, NVLINK), launch=9e-4, overhead=1.25e-3)
A100_COMPILED = replace(A100, launch=2.5e-4, overhead=1.5e-4)
FAST = {2: 250 * G, 4: 250 * G, 8: 250 * G}
H100 = Machine(*("H100", 570 * T, 430 * T, 3 * T, 300 * G, FAST), half_rate=160, overhead=1.5e-4)
H20 = Machine(*("H20", 130 * T, 120 * T, 4 * T, 300 * G, FAST), overhead=1.5e-4)
GB200 = Machine(*("GB200", 1800 * T, 1450 * T, 7 * T, 600 * G, {8: 500 * G}), ranks=16)
# peers reach each other through the host, by 8 lanes of PCIe 4.0
RTX2000 = Machine(*("RTX 2000 Ada", 24 * T, 22 * T, 0.2 * T, 8 * G, {2: 8 * G}), launch=5e-4)
RDNA4 = Machine(*("RDNA4", 90 * T, 60 * T, 0.64 * T, 14 * G, {2: 13 * G, 4: 9 * G}))


@dataclass(frozen=True)
class Case:
    """One published table: plans of a model, a request and a machine -> seconds."""

    source: str
    model: ModelShape
    machine: Machine
    request: RequestEstimate
    seconds: dict[str, float]

    def projected(self, name: str, machine: Machine | None = None) -> float:
        """Project the seconds of a plan, as the published engine runs it: xDiT, of which all PipeFusion here
        is, computes the whole prompt of joint models with every patch, and not once for all patches."""
        plan, machine = self.plans[name], machine or self.machine
        cost = Cost(self.model, plan, machine, request=self.request)
        if not (plan.has_stale_kv and self.model.joint):
            return cost.total
        patches, text = plan.patches, self.request.text_tokens
        shape = replace(self.model, blocks=tuple(_with_text(b, patches) for b in self.model.blocks))
        request = replace(self.request, text_tokens=patches * text)
        warm = min(plan.warmup_steps, request.steps)
        steady = Cost(shape, plan, machine, request=request).step(patches)
        return warm * cost.step(1) + (request.steps - warm) * steady

    @property
    def plans(self) -> dict[str, ParallelConfig]:
        """Name of each plan -> its configuration."""
        return {name: plan(name) for name in self.seconds}


def _with_text(block: BlockShape, patches: int) -> BlockShape:
    """Return a block that attends from ``patches`` copies of the text to one: (image + M text) (image + text)
    pairs, where the request has M times the text."""
    pairs = block.image_pairs
    return replace(block, cross_pairs=pairs * (patches + 1) / patches, text_pairs=pairs / patches)


def plan(name: str) -> ParallelConfig:
    """Read "cfg2 pp4"; PipeFusion with as many patches as stages. "1" is one GPU."""
    degrees = {}
    for word in name.split() if name != "1" else ():
        axis = word.rstrip("0123456789")
        degrees[NAMES[axis]] = int(word.removeprefix(axis))
    return ParallelConfig(**degrees)


def table(source, model, machine, tokens: tuple[int, int], steps: int, prompts: int, **seconds) -> Case:
    """One table; "one" is one GPU, and _ stands for the space in the name of a plan."""
    named = {"1" if name == "one" else name.replace("_", " "): value for name, value in seconds.items()}
    return Case(source, model, machine, RequestEstimate(*tokens, steps, prompts), named)


CASES = (
    table("XP", FLUX, L40, (4096, 512), 28, 1, one=18.36, pp2=11.03, pp4=7.05, pp8=5.53, u8=26.0),
    table("XP", FLUX, L40, (16384, 512), 28, 1, one=105.7, pp2=58.15, pp4=30.1, pp8=18.68, r8=23.5),
    table("XP", FLUX, L40, (65536, 512), 28, 1, one=855.1, pp2=470.8, pp4=235.95, pp8=133.64),
    table("X", FLUX, A100, (4096, 512), 28, 1, one=12.77, u2=8.16, u4=5.55, u8=4.13),
    table("X", FLUX, H100, (4096, 512), 28, 1, one=4.30, r2=2.60, u4=1.63, r4=1.98),
    table("C", FLUX, L20, (4096, 512), 28, 1, one=23.56, u2=13.80, u4=8.28, r4=9.16, tp2=14.61, tp4=10.69),
    table("A", FLUX, A100, (4096, 512), 28, 1, one=13.84, r2=8.31, u2_r2=6.16),
    table("A", FLUX, A100_COMPILED, (4096, 512), 28, 1, one=9.997, r2=5.78, u2_r2=3.56),
    table("D", FLUX, L20, (4096, 512), 28, 1, u4=281, r4=351, u2_r2=324),
    table("D", FLUX, RTX4090, (4096, 512), 28, 1, u4=259, r4=339, u2_r2=322),
    table("C", FLUX2, L20, (4096, 512), 28, 1, tp4=27.7, tp8=21.4, u4_tp2=15.2),
    table("C", QWEN, H100, (6889, 128), 50, 2, one=18.49, u2=12.81),
    table("R", QWEN, RDNA4, (32768, 512), 50, 2, u2=209, cfg2=168.7, u4=151.9, cfg2_u2=101.7),
    table("XP", SD3, L40, (4096, 333), 20, 2, one=3.92, cfg2=1.91, cfg2_pp2=1.26, cfg2_pp4=0.91),
    table("XP", SD3, L40, (16384, 333), 20, 2, one=22.82, cfg2=11.12, cfg2_pp2=6.15, cfg2_pp4=3.67),
    table("X", SD3, A100, (4096, 333), 20, 2, one=2.71, cfg2=1.43, cfg2_u2=1.01, cfg2_u4=0.94),
    table("X", SD3, A100, (16384, 333), 20, 2, one=15.91, cfg2=8.11, cfg2_u2=4.58, cfg2_u4=2.81),
    table("XP", PIXART, L40, (4096, 120), 20, 2, one=2.80, cfg2=1.40, cfg2_pp2=0.82, cfg2_pp4=0.62),
    table("XP", PIXART, L40, (16384, 120), 20, 2, one=21.6, cfg2=10.66, cfg2_pp2=5.43, cfg2_pp4=3.09),
    table("XP", PIXART, L40, (65536, 120), 20, 2, one=244.9, cfg2=120.6, cfg2_pp2=60.8, cfg2_pp4=33.0),
    table("X", HUNYUAN, H100, (118800, 256), 50, 1, one=1904, u2=925, u4=514, u8=337.6),
    table("X", HUNYUAN, H20, (118800, 256), 50, 1, one=6639, u2=3401, u4=1763, u8=941),
    table("X", HUNYUAN, L20, (118800, 256), 50, 1, one=6044, u2=3271, u4=2080),
    table("X", SANA, A100, (16384, 300), 20, 2, one=17.55, cfg2=8.37, cfg2_u2_r2=3.99),
    table("X", CONSISID, H100, (17550, 226), 50, 2, one=114.9, cfg2=59.7, cfg2_r2=40.7),
    table("L", FLUX, RTX2000, (4096, 512), 1, 1, one=2.22, u2=1.26),
    table("L", CHROMA, RTX2000, (4096, 512), 1, 2, one=5.14, u2=3.24),
    table("X", COG, L40, (17550, 226), 50, 2, one=311.4, cfg2=156.6, cfg2_r2=92.2),
    table(
        *("X", COG, L40, (85680, 226), 50, 2),
        **dict(one=3624, cfg2=1856, u2=2092, r2=2023, r4=1163, u4=1484, cfg2_u2_r2=592.7),
    ),
    table("S", STEP, H20, (55488, 320), 50, 2, u8=30.1, tp8=30.4),
    table(
        *("T", WAN, GB200, (75600, 512), 40, 2),
        **dict(one=348.4, cfg2=174.0, cfg2_u2=95.9, cfg2_u4=48.1, cfg2_u4_r2=25.6),
    ),
)

#: What of the collection that these were read from is not among them -> why.
LEFT_OUT = {
    "plans on several machines (16 L40, 2 x 8 L40)": "the model has one kind of link",
    "more than 16 GB200": "the plan is not named",
    "Mochi on A100 (149.9; cfg2 81.9; cfg2 r2 47.1)": "frames and steps are not given",
    "Step-Video's one GPU (213.6)": "frames and steps are not given",
    "Flux.1-dev 2048 on A100": "its figure contradicts its labels",
    "Flux.1-dev 50 steps on 2 H100, Flux.1-schnell on A100": "the plan is not named",
    "BAGEL": "no supported model",
    "Qwen-Image on 2 L20": "one GPU offloads its weights",
    "PixArt 4096 on A100": "eight GPUs are more than eight times one, whose time is no base",
    "SANA on four GPUs (5.60), ConsisID and CogVideoX on six": "the plan is not named",
    "HunyuanVideo and Flux with a cache of steps": "steps that are skipped are not modelled",
    "Wan2.2 832 x 480 of vLLM-omni (26.1; usp2 19.1)": "frames and steps are not given",
    "Wan of users, Wan2.2 of 27 steps on four H100 (282)": "the plan or one GPU's time is not given",
    "Wan 14B fp8 and HunyuanVideo Q4 of raylight (1.78x, 1.72x)": "size and frames are not given",
    "the second run of Flux.1-dev on H100 (3.88; 3.7; 2.21), L20 with asynchronous Ulysses or compiled": (
        "other settings of the same row"
    ),
    "SDXL": "a U-Net",
}
