"""Reference images: their positions and tokens against diffusers' own, and what is computed once."""

from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from ranks.flux_requests import shortened
from tiny import as_folder, relative
from tolerance import assert_same_bits, assert_ulps
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import qwen_image21
from backend.models.common import references
from backend.models.latent_tokens import TokenGrid
from backend.parallel import mesh
from backend.parallel.modulation import modulation_cache
from backend.parallel.pipeline_stage import model_output
from backend.protocol import REFERENCE_METHODS
from backend.sampling.model_inputs import arguments_of
from backend.sampling.model_runner import Runner
from backend.sampling.step_loop import Callbacks


@pytest.fixture(scope="module")
def plain_and_marked(tmp_path_factory):
    """A Qwen-Image without Edit 2511's mark, and the same weights with it."""
    folder = tmp_path_factory.mktemp("models")
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    for model, name in (("plain", "qwen-image-edit-zero"), ("marked", "qwen-image-edit-2511")):
        engine.load(model, str(write(folder / f"{model}.safetensors", name)), "default")
    return engine


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("patches", [1, 2])
def test_the_request_decides_whether_references_are_at_timestep_zero(
    patches, batch, plain_and_marked, monkeypatch
):
    """Of a Qwen-Image without Edit 2511's mark: the latent is that of the same weights with the mark. Both
    have modulation of both timesteps computed ahead, which is that of every step. Requests of one timestep
    are as before."""
    engine = plain_and_marked
    sample = shortened(replace(request("qwen-image-edit-zero"), num_pipeline_patch=patches), 2)
    double = {name: torch.cat([sample.tensors[name]] * batch) for name in ("noise", "latent")}
    zero = {
        name: replace(sample, model=name, tensors=sample.tensors | double) for name in ("plain", "marked")
    }
    tensors = {name: value for name, value in zero["plain"].tensors.items() if "method" not in name}
    plain = replace(zero["plain"], tensors=tensors)
    before, _ = engine.sample(plain, Callbacks())
    found, _ = engine.sample(zero["plain"], Callbacks())
    assert modulation_cache.COMPUTED["modulation"]
    wanted, _ = engine.sample(zero["marked"], Callbacks())
    assert modulation_cache.COMPUTED["modulation"]
    assert relative(found, wanted) <= 1e-5 < relative(before, wanted)
    assert_same_bits(engine.sample(plain, Callbacks())[0], before)
    monkeypatch.setattr(Runner, "modulate_ahead", lambda *_: None)
    in_each_step, _ = engine.sample(zero["marked"], Callbacks())
    layers = len(engine.models["marked"].cache.modulations)
    assert modulation_cache.COMPUTED["modulation"] == 2 * 2 * layers  # of two steps and prompts
    assert relative(wanted, in_each_step) <= 1e-5


def test_layers_with_references_at_timestep_zero_are_a_batch(tmp_path):
    """Whose numbers for the transparency are as many as the times, of latent and references."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("layers", str(write(tmp_path / "layers.safetensors", "qwen-image-layered")), "default")
    sample = shortened(replace(request("qwen-image-layered"), model="layers"), 2)
    zero = torch.tensor(REFERENCE_METHODS.index("index_timestep_zero"))
    tensors = sample.tensors | {f"{side}.ref_latents_method": zero for side in ("positive", "negative")}
    one, _ = engine.sample(replace(sample, tensors=tensors), Callbacks())
    double = {name: torch.cat([tensors[name]] * 2) for name in ("noise", "latent")}
    both, _ = engine.sample(replace(sample, tensors=tensors | double), Callbacks())
    assert relative(both, torch.cat([one, one])) <= 1e-5


def test_a_reference_that_no_weight_reads_changes_nothing_and_is_named(tmp_path):
    """ComfyUI's Wan looks at it where the file has a convolution for it, and nowhere else."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "wan.safetensors", "wan22-i2v")), "default")
    sample = shortened(request("wan22-i2v"), 2)
    wanted, before = engine.sample(sample, Callbacks())
    unread = {"positive.reference_latent": torch.ones(1, 16, 3, 5)}
    found, stats = engine.sample(replace(sample, tensors=sample.tensors | unread), Callbacks())
    assert_same_bits(found, wanted)
    assert before["notes"] == []
    assert stats["notes"] == ["this file has no reference convolution: the reference image is not used"]


@pytest.mark.parametrize(
    "method, want",
    [
        # by ComfyUI's rules: side by side along the shorter side | numbered | both behind the image's lower
        # right corner
        ("offset", [(1, 0, 0), (1, 6, 0)]),
        ("index", [(1, 0, 0), (2, 0, 0)]),
        ("uxo", [(0, 8, 9), (0, 14, 16)]),
        ("negative_index", [(-1, 0, 0), (-2, 0, 0)]),
    ],
)
def test_corners_of_references(method, want):
    grid = TokenGrid((16, 15, 18), (1, 2, 2))
    found = [TokenGrid((16, *size), (1, 2, 2)) for size in ((11, 14), (8, 27))]
    assert references.corners(grid, found, method) == want


def test_qwen_image_places_by_what_it_does_not_know_as_by_offset(tmp_path):
    """As ComfyUI's, whose Flux alone has uxo."""
    checkpoint = open_checkpoint(str(write(tmp_path / "edit.safetensors", "qwen-image-edit")))
    tensors = request("qwen-image-edit").tensors
    latent = tensors["noise"]
    grid = checkpoint.family.latent.grid(checkpoint.config, latent.shape[1:], [])
    prompt = arguments_of("positive", tensors)

    def positions(method):
        number = torch.tensor(REFERENCE_METHODS.index(method))
        cond = prompt | {"ref_latents_method": number}
        arguments = checkpoint.family.io.arguments(
            checkpoint.config, grid, checkpoint.family.io.of_latent(latent, grid), torch.tensor(0.7), cond
        )
        return arguments["places"].positions

    assert torch.equal(positions("uxo"), positions("offset"))
    assert not torch.equal(positions("index"), positions("offset"))


@torch.inference_mode()
def test_flux3_is_given_references_as_diffusers_gives_them(tmp_path):
    """Tokens and positions of diffusers' own pipeline, in its own transformer."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "flux3-edit.safetensors", "flux3-edit")), "default")
    model, sample = engine.models["tiny"], request("flux3-edit")
    plain = diffusers.Flux3Transformer2DModel(**model.checkpoint.config).eval()
    plain.load_state_dict(
        {name.replace(".layer.", "."): value for name, value in model.transformer.state_dict().items()}
    )
    cond = {
        key.removeprefix("positive."): value
        for key, value in sample.tensors.items()
        if key.startswith("positive.")
    }
    latent, text, time = sample.tensors["noise"], cond["c_crossattn"], torch.tensor([0.7])
    grid = TokenGrid(tuple(latent.shape[1:]), (1, 1, 1))
    found = model.family.io.output(
        model_output(
            model.transformer,
            model.family.io.arguments(
                model.checkpoint.config, grid, model.family.io.of_latent(latent, grid), time[0], cond
            ),
        ),
        grid,
    )

    pack, images = lambda latent: latent.flatten(2).transpose(1, 2), references.references(cond)

    def ids(latent, number):
        return _prepare_image_ids(*latent.shape[-2:], 0.5, l_coord=number)

    rows = torch.cartesian_prod(
        torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(text.shape[1])
    )
    want = plain(
        pack(latent),
        text,
        time,
        ids(latent, 0),
        rows,
        image_cond_hidden_states=torch.cat([pack(image) for image in images], dim=1),
        image_cond_ids=torch.cat([ids(image, -1 - i) for i, image in enumerate(images)]),
    ).sample
    assert len(images) == 2
    assert_ulps(found, want, sum(len(plain.get_submodule(name)) for name in model.family.blocks.lists))


def qwen_image21_of(folder, case):
    """The request of a variant; family, configuration and transformer of its file; diffusers' own model of
    the same weights."""
    checkpoint = open_checkpoint(str(write(folder / f"{case}.safetensors", case)))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    plain = diffusers.QwenImage21Transformer2DModel(**checkpoint.config).eval()
    plain.load_state_dict(checkpoint.transformer.state_dict())
    return request(case), (checkpoint.family, checkpoint.config, checkpoint.transformer), plain


@torch.inference_mode()
@pytest.mark.parametrize("branch", ["positive", "negative"])
def test_qwen_image21_is_given_references_as_diffusers_gives_them(branch, tmp_path):
    """In the slots of its pipeline's text encoder, which stand for 2 x 2 tokens each, with diffusers' own
    attention and positions.
    """
    sample, (family, config, ours), plain = qwen_image21_of(tmp_path, "qwen-image21-edit")
    cond = {
        key.removeprefix(f"{branch}."): value
        for key, value in sample.tensors.items()
        if key.startswith(f"{branch}.")
    }
    latent, text, time = sample.tensors["noise"], cond["c_crossattn"], torch.tensor([0.7])
    grid = TokenGrid(tuple(latent.shape[1:]), (1, 1, 1))
    found = family.io.output(
        model_output(
            ours, family.io.arguments(config, grid, family.io.of_latent(latent, grid), time[0], cond)
        ),
        grid,
    )

    rows, slots = list(text[0].unbind(0)), [False] * text.shape[1]
    images = references.references(cond)
    for at, image in reversed(list(zip(cond["image_slots"][0].tolist(), images))):
        count = image.shape[-2] * image.shape[-1] // 4
        rows[at:at], slots[at:at] = [torch.full((text.shape[2],), 5.0)] * count, [True] * count

    def pack(latent):
        return latent.flatten(2).transpose(1, 2)

    want = plain(
        torch.cat([pack(image) for image in (*images, latent)], dim=1),
        torch.stack(rows)[None],
        time,
        [[(1, *image.shape[-2:]) for image in (*images, latent)]],
        torch.tensor([slots + [True] * (grid.tokens // 4)]),
    ).sample[:, -grid.tokens :]
    assert len(images) == {"positive": 2, "negative": 1}[branch]
    assert_ulps(found, want, len(plain.transformer_blocks))


@torch.inference_mode()
def test_qwen_image21_makes_images_of_odd_sides(tmp_path):
    """Sizes that diffusers' forward has no slots for: its own blocks, one by one, on the sequence."""
    sample, (family, config, ours), plain = qwen_image21_of(tmp_path, "qwen-image21-odd")
    latent, text, image = (
        sample.tensors["noise"],
        sample.tensors["positive.c_crossattn"],
        sample.tensors["positive.ref_latents.0"],
    )
    cond, grid = (
        {"c_crossattn": text, "ref_latents.0": image, "image_slots": torch.tensor([[4]])},
        TokenGrid((64, 7, 9), (1, 1, 1)),
    )
    found = family.io.output(
        model_output(
            ours,
            family.io.arguments(config, grid, family.io.of_latent(latent, grid), torch.tensor(0.7), cond),
        ),
        grid,
    )

    text, pixels = (
        plain.txt_in(text),
        [plain.img_in(one.flatten(2).transpose(1, 2)) for one in (image, latent)],
    )
    rows, rotary = (
        torch.cat([text[:, :4], pixels[0], text[:, 4:], pixels[1]], dim=1),
        ours.pos_embed.table(qwen_image21.positions(grid, cond, None)),
    )
    made, temb = torch.arange(rows.shape[1]) >= 12 + 15, plain.time_text_embed(torch.tensor([0.7, 0.0]), rows)
    for block in plain.transformer_blocks:
        rows = block(
            rows,
            plain.modulation(temb),
            rotary,
            None,
            made,
            segments=[(0, 4, True), (4, 19, False), (19, 27, True)],
        )
    want = plain.proj_out(plain.norm_out(rows, temb, made))[:, 27:]
    assert found.shape == (1, 63, 64)
    assert_ulps(found, want, len(plain.transformer_blocks))


def test_what_references_decide_is_computed_once(tmp_path):
    """Flux.3's prompt and references, each one embedder, four blocks and two modulations, and the positions
    of both and of the image, once a request and branch; both timesteps' embeddings, the image's
    modulations and the last norm's once an evaluation."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "flux3-edit.safetensors", "flux3-edit")), "default")
    sample = request("flux3-edit")
    engine.sample(sample, Callbacks())
    evaluations = len(sample.tensors["sigmas"]) - 1
    assert modulation_cache.COMPUTED == {
        "prompt": 2 * (7 + 7 + 3),
        "step": 2 * (2 * 2 + 2 + 2) * evaluations,
    }


@pytest.mark.parametrize("causal", [True, False])
def test_what_no_step_changes_runs_once(causal, tmp_path):
    """Text and references of Qwen-Image 2.1 are rows of a prompt's first evaluation alone, unless the step
    modulates them.
    """
    folder = as_folder(write(tmp_path / "edit.safetensors", "qwen-image21-edit"), causal_condition=causal)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(folder), "default")
    rows, sample = [], request("qwen-image21-edit")
    engine.models["tiny"].transformer.transformer_blocks[1].attn.to_q.register_forward_pre_hook(
        lambda layer, args: rows.append(args[0].shape[1])
    )
    engine.sample(sample, Callbacks())
    both = [12 + 32 + 36 + 80, 7 + 32 + 80]
    assert rows == both + ([80] * 10 if causal else both * 5)


def test_samples_with_references_at_other_places_are_no_batch():
    grid, cond = (
        TokenGrid((64, 8, 10), (1, 1, 1)),
        {"c_crossattn": torch.zeros(2, 2, 8), "ref_latents.0": torch.zeros(2, 64, 4, 8)},
    )
    assert qwen_image21.refusal({}, grid, cond | {"image_slots": torch.tensor([[1], [1]])}) is None
    assert "from sample to sample" in qwen_image21.refusal(
        {}, grid, cond | {"image_slots": torch.tensor([[1], [0]])}
    )


def test_images_of_odd_and_even_sides_have_one_middle():
    """As ComfyUI's Qwen-Image 2.1 places them: columns of a reference seven wide fall between those of a
    image ten wide.
    """
    grid, cond = (
        TokenGrid((64, 8, 10), (1, 1, 1)),
        {
            "c_crossattn": torch.zeros(1, 2, 8),
            "ref_latents.0": torch.zeros(1, 64, 4, 7),
            "image_slots": torch.tensor([[1]]),
        },
    )
    found = qwen_image21.positions(grid, cond, None)
    assert (
        found[:1].tolist() == [[0] * 3]
        and found[1:8, 2].tolist() == [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
        and found[1:29, 0].unique().tolist() == [1]
    )
    assert (
        found[29].tolist() == [8] * 3 and found[30].tolist() == [9, -4, -5] and len(found) == 1 + 28 + 1 + 80
    )
