"""What does not change within a request or a step is computed once: counted in every family."""

import inspect
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from diffusers.models import attention_processor
from diffusers.models.transformers import transformer_flux, transformer_flux2
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from families import golden
from ranks.flux_requests import shortened
from tiny import golden_request, write_checkpoint, write_shallow_flux
from tolerance import assert_same_bits
from variants import VARIANTS, request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import wan_animate
from backend.models.common.fewer_passes import angles_of
from backend.models.common.known_signatures import CACHED_INSPECT, known_signatures
from backend.models.common.ltx2_blocks import audio_corners
from backend.parallel import mesh
from backend.parallel.modulation import modulation_cache
from backend.sampling import model_runner
from backend.sampling.step_loop import Callbacks

SIDES = ("positive", "negative")
#: One that warms up, and two of patches: an answer can be the step's, the patch's or the step before's.
STALE_STEPS = PATCHES = 3


@pytest.mark.parametrize(
    "family, prompt, step, modulation",
    [("minimax-h3", 6, 5, 4), ("lumina2", 8, 6, 6), ("flux3", 18, 8, 0), ("cogvideox", 2, 6, 16)],
)
def test_what_the_prompt_or_the_step_decides_is_computed_once(family, prompt, step, modulation, tmp_path):
    """Embedders and refiners of the prompt and tables of positions once a request and branch, those of the
    timestep once an evaluation and branch, modulation once for all steps and branches."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    sample = golden(f"{family}__euler_simple")[0]
    engine.sample(sample, Callbacks())
    evaluations = len(sample.tensors["sigmas"]) - 1
    assert modulation_cache.COMPUTED == {
        kind: count
        for kind, count in (
            ("prompt", prompt),
            ("step", step * evaluations * len(SIDES)),
            ("modulation", modulation),
        )
        if count
    }


@pytest.mark.parametrize("family", ["flux-dev", "qwen-image"])
def test_positions_of_the_steps_serve_before_the_first_one(family, tmp_path):
    """Where modulation is computed ahead, which asks the model for every step's embedding."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    sample, calls = shortened(golden(f"{family}__euler_simple")[0], 2), []
    positions = engine.models["tiny"].transformer.pos_embed
    positions.layer.register_forward_hook(lambda *_: calls.append(positions.current.context))
    for _ in range(2):
        engine.sample(sample, Callbacks())
    prompts = {each.prompt for each in calls}
    assert len(calls) == 2 * len(prompts) and None not in calls
    assert positions.current.context is None


def test_answers_for_a_whole_batch_do_not_outlive_its_modulation(tmp_path, monkeypatch):
    """The steps of a pipeline, and calls of a model, take samples one by one, and never ask for them."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_shallow_flux(tmp_path / "flux.safetensors")), "default")
    ahead, held = model_runner.Runner.modulate_ahead, []

    def look(self, *args):
        ahead(self, *args)
        held.append(sum(len(layer.known) for layer in self.model.cache.layers))

    monkeypatch.setattr(model_runner.Runner, "modulate_ahead", look)
    for case in ("euler_simple", "batch2"):
        engine.sample(golden_request(case)[0], Callbacks())
    assert held[0] > 0 and held[1] == 0


def forget_outputs(monkeypatch, kind: str):
    """Have layers of this ``kind`` compute each answer."""
    cached = modulation_cache.CachedLayer.forward
    monkeypatch.setattr(
        modulation_cache.CachedLayer,
        "forward",
        lambda self, *arguments, **named: (self.layer if self.kind == kind else cached.__get__(self))(
            *arguments, **named
        ),
    )


@pytest.mark.parametrize(
    "family, layers, before",
    [
        ("wan21-t2v", 2, 2),
        ("pixart-sigma", 2, 1),
        ("ltxv", 2, 2),
        ("hunyuan-dit", 2, 1),
        ("sana", 2, 2),
        ("ltx2", 4, 6),
    ],
)
def test_keys_and_values_of_the_prompt_are_computed_once_a_request(
    family, layers, before, tmp_path, monkeypatch
):
    """``layers`` of every block, and ``before`` the blocks, for both branches, whatever the steps and
    patches; and the latent is the one without memory, to the last bit: a prompt's rows are multiplied by the
    same kernel each time."""
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    model = engine.models["tiny"]
    sample = shortened(replace(golden(f"{family}__euler_simple")[0], num_pipeline_patch=2), STALE_STEPS)
    samples, _ = engine.sample(sample, Callbacks())
    blocks = sum(len(model.transformer.get_submodule(name)) for name in model.family.blocks.lists)
    assert modulation_cache.COMPUTED["prompt"] == 2 * (blocks * layers + before)
    forget_outputs(monkeypatch, "prompt")
    assert_same_bits(engine.sample(sample, Callbacks())[0], samples)


@pytest.mark.parametrize("clock", [{}, dict(scale_factor=8, hop_length=320, sampling_rate=48000)])
def test_moments_of_audio_are_those_that_diffusers_makes_at_every_step(clock, tmp_path):
    """Of the usual clock, and of one that a folder states."""
    path = str(write_checkpoint(tmp_path / "ltx2.safetensors", "ltx2"))
    config = open_checkpoint(path).config | {f"audio_{name}": value for name, value in clock.items()}
    theirs = LTX2VideoTransformer3DModel.from_config(config).audio_rope
    found = audio_corners(config, 7, torch.device("cpu"))
    assert_same_bits(found, theirs.prepare_audio_coords(1, 7, torch.device("cpu")))


def test_faces_are_encoded_once_a_request(tmp_path, monkeypatch):
    """For each prompt, a few at once; and the latent is the one without memory."""
    monkeypatch.setattr(wan_animate, "FACES_AT_ONCE", 2)
    file = write(tmp_path / "animate.safetensors", "wan22-animate-small")
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    engine.load("tiny", str(file), "default")
    sample = shortened(replace(request("wan22-animate-small"), num_pipeline_patch=2), STALE_STEPS)
    calls = Counter()
    for name in ("motion_encoder", "face_encoder"):
        encoder = engine.models["tiny"].transformer.get_submodule(name)
        encoder.layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    samples, _ = engine.sample(sample, Callbacks())
    pieces = math.ceil(sample.tensors["positive.face_pixel_values"].shape[2] / wan_animate.FACES_AT_ONCE)
    assert pieces > 1 and calls == {"motion_encoder": pieces * len(SIDES), "face_encoder": len(SIDES)}
    forget_outputs(monkeypatch, "prompt")
    assert_same_bits(engine.sample(sample, Callbacks())[0], samples)


@pytest.mark.parametrize(
    "family, before, after",
    [
        ("chroma", 2, 0),
        ("cogvideox", 2, 2),
        ("flux-dev", 1, 2),
        ("flux2-dev", 4, 2),
        ("flux2-edit", 4, 2),
        ("flux3", 6, 2),
        ("flux3-edit", 6, 2),
        ("hidream", 1, 1),
        ("hunyuan-dit", 1, 2),
        ("hunyuan-image21", 2, 2),
        ("hunyuan-image21-distilled", 2, 2),
        ("hunyuan-video", 2, 2),
        ("hunyuan-video-i2v-v2", 2, 3),
        ("hunyuan-video15", 2, 2),
        ("hunyuan-video15-meanflow", 2, 2),
        ("ideogram4", 2, 1),
        ("kandinsky5", 3, 1),
        ("krea2", 2, 0),
        ("krea2-edit", 2, 0),
        ("ltx2", 18, 0),
        ("ltx2-i2v", 18, 0),
        ("ltx23", 24, 0),
        ("ltxv", 3, 0),
        ("ltxv-i2v", 3, 0),
        ("lumina2", 2, 2),
        ("minimax-h3", 2, 1),
        ("minimax-h3-guides", 2, 1),
        ("pixart-alpha", 1, 0),
        ("pixart-sigma", 1, 0),
        ("qwen-image", 1, 2),
        ("qwen-image-edit-2511", 1, 2),
        ("qwen-image21", 2, 2),
        ("qwen-image21-edit", 2, 2),
        ("sana", 1, 0),
        ("sd3", 1, 2),
        ("wan21-t2v", 2, 0),
        ("wan22-animate-small", 1, 0),
        ("wan22-ti2v", 2, 0),
        ("z-image-turbo", 1, 1),
    ],
)
def test_embedders_of_the_timestep_run_once_an_evaluation(family, before, after, tmp_path, monkeypatch):
    """And the modulation ``after`` the blocks. Of both branches, whatever the patches; and the latent is the
    one without memory, to the last bit. Wan 2.2's 5B has a timestep for each frame. One of HunyuanVideo's
    branches has a given first frame, with a modulation of its own, which not every patch asks for."""
    is_variant = family in VARIANTS
    file = (write if is_variant else write_checkpoint)(tmp_path / f"{family}.safetensors", family)
    engine = Engine(ParallelConfig(num_pipeline_patch=PATCHES), mesh.single())
    engine.load("tiny", str(file), "default")
    sample = request(family) if is_variant else golden(f"{family}__euler_simple")[0]
    sample = shortened(replace(sample, num_pipeline_patch=PATCHES), STALE_STEPS)
    samples, _ = engine.sample(sample, Callbacks())
    evaluations = len(sample.tensors["sigmas"]) - 1
    # modulation is computed ahead of the steps, with embeddings of its own
    asked = 1 + bool(modulation_cache.COMPUTED["modulation"])
    assert modulation_cache.COMPUTED["step"] == len(SIDES) * evaluations * (before * asked + after)
    forget_outputs(monkeypatch, "step")
    assert_same_bits(engine.sample(sample, Callbacks())[0], samples)


def test_modulation_of_a_soft_mask_is_not_held_after_its_call(tmp_path):
    """Each token has a timestep of its own: cached, it would be there for every prompt at once."""
    engine = Engine(ParallelConfig(num_pipeline_patch=PATCHES), mesh.single())
    engine.load("tiny", str(write(tmp_path / "ltxv.safetensors", "ltxv-i2v")), "default")
    sample = shortened(replace(request("ltxv-i2v"), num_pipeline_patch=PATCHES), STALE_STEPS)
    sides = sample.tensors["noise"].shape[2:]
    mask = torch.linspace(0.1, 1, math.prod(sides)).view(1, 1, *sides)
    masks = {name: mask for name in sample.tensors if name.endswith("denoise_mask")}
    sample = replace(sample, tensors=sample.tensors | masks)
    assert mask.numel() > modulation_cache.TIMESTEPS and set(SIDES) <= {name[:8] for name in masks}
    engine.sample(sample, Callbacks())
    assert modulation_cache.COMPUTED["step"] == 0 < modulation_cache.COMPUTED["prompt"]


@pytest.mark.parametrize("family", ["flux-dev", "sd3", "wan21-t2v"])
def test_signatures_and_angles_are_read_and_made_once(family, tmp_path, monkeypatch):
    """Of attention's processors at most once in a process, of tables of positions once a request: diffusers
    does both in every block of every step."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    sample, calls = shortened(golden(f"{family}__euler_simple")[0], 2), Counter()

    def counted(module, name: str):
        theirs = getattr(module, name)

        def call(*args, **kwargs):
            calls[name, getattr(args[0], "__name__", "")] += 1
            return theirs(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    wanted, _ = engine.sample(sample, Callbacks())
    counted(inspect, "signature")
    counted(torch, "complex")
    found, _ = engine.sample(sample, Callbacks())
    assert_same_bits(found, wanted)
    assert calls["signature", "__call__"] == 0
    assert calls["complex", ""] <= len(SIDES)


def test_diffusers_reads_its_own_signatures_after_a_request():
    """And whatever else it asks the module for."""
    readers = (attention_processor, transformer_flux, transformer_flux2)
    with pytest.raises(ZeroDivisionError), known_signatures():
        assert all(module.inspect is CACHED_INSPECT for module in readers)
        assert CACHED_INSPECT.isclass(int) and CACHED_INSPECT.signature(counts) == inspect.signature(counts)
        methods = [Counter(each).most_common for each in ("a", "b")]
        assert {CACHED_INSPECT.signature(method) for method in methods} == {inspect.signature(methods[0])}
        raise ZeroDivisionError
    assert all(module.inspect is inspect for module in readers)


def counts(x: int, y: str = ""):
    """A function."""


def test_tables_keep_their_angles_for_the_same_other_table_alone():
    cos, sin = (torch.rand(5, 4).repeat_interleave(2, -1) for _ in range(2))
    known = angles_of((cos, sin))
    assert known.equal(torch.complex(cos[:, ::2], sin[:, ::2]))
    assert angles_of((cos, sin)) is known
    assert angles_of((cos, -sin)).equal(known.conj())
