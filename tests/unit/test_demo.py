"""The bundled model's images follow their prompts, through the engine."""

import runpy

import pytest
import torch
from pack import ROOT

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.planner import drift as planner
from backend.planner.candidates import MIN_STEPS
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks
from demo import shapes

PROMPTS = shapes.random_prompts(10, seed=5)
STEPS, CFG = 8, 2.5


@pytest.fixture(scope="module")
def checks():
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("demo", str(ROOT / "demo" / "shapes-flux"), "fp32")
    noise = torch.randn(len(PROMPTS), 16, 32, 32, generator=torch.Generator().manual_seed(0))
    tensors = {"noise": noise, "latent": torch.zeros_like(noise), "sigmas": torch.linspace(1, 0, STEPS + 1)}
    for branch, prompts in (("positive", PROMPTS), ("negative", [""] * len(PROMPTS))):
        encoded = [shapes.encode_prompt(prompt) for prompt in prompts]
        tensors[f"{branch}.c_crossattn"] = torch.cat([text for text, _ in encoded])
        tensors[f"{branch}.y"] = torch.cat([pooled for _, pooled in encoded])
    samples, _ = engine.sample(Sample("demo", "euler", CFG, 0, tensors=tensors), Callbacks())
    return [
        shapes.check_image(prompt, image)
        for prompt, image in zip(PROMPTS, shapes.decode(shapes.to_vae_units(samples)))
    ]


def test_colours_and_places_follow_the_prompt(checks):
    """At least 90 % of the images have every object in its colour and place, and nothing else."""
    right = sum(not check.misplaced for check in checks)
    print(f"{right} of {len(checks)} right in colour and place")
    assert right >= 0.9 * len(checks)


def test_shapes_mostly_follow_too(checks):
    """Circles and squares of a few pixels are hard to tell for so small a model."""
    assert sum(map(bool, checks)) >= 0.6 * len(checks)


def test_the_check_can_fail():
    """Drawn scenes pass; the same images under each other's prompts do not."""
    drawn = [shapes.draw(shapes.parse_prompt(prompt)) for prompt in PROMPTS]
    images = [(image.permute(1, 2, 0) + 1) / 2 for image in drawn]
    assert all(shapes.check_image(prompt, image) for prompt, image in zip(PROMPTS, images))
    wrong = [
        not shapes.check_image(prompt, image).misplaced
        for prompt, image in zip(PROMPTS, images[1:] + images[:1])
    ]
    assert sum(wrong) <= 2


def test_model_fits_in_the_repository():
    assert (ROOT / "demo" / "shapes-flux" / "diffusion_pytorch_model.safetensors").stat().st_size <= 20e6


@pytest.mark.parametrize(
    "argument, sentence",
    [
        ("--out=image", "'image' is not the name of a .png file"),
        ("--out=image.jpeg", "'image.jpeg' is not the name of a .png file"),
        ("--steps=0", "'0' is not a whole number of at least 1"),
        ("--repeat=-1", "'-1' is not a whole number of at least 1"),
    ],
)
def test_wrong_options_are_told_before_ranks_start(argument, sentence, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["demo", argument])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "scripts/demo_options.py"), run_name="__main__")
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("count, device", [(0, "auto"), (1, "cpu"), (2, "auto")])
def test_the_demo_in_comfyui_runs_with_one_gpu_too(monkeypatch, count, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    graph = runpy.run_path(str(ROOT / "scripts/demo_comfyui.py"))["workflow"]()
    (config,) = (node for node in graph.values() if node["class_type"] == "ParallelConfig")
    assert config["inputs"]["device"] == device and config["inputs"]["cfg_degree"] == 2


@pytest.mark.parametrize("works, count, device", [(True, 2, "cuda"), (True, 1, "cpu"), (False, 2, "cpu")])
def test_the_demo_takes_gpus_that_torch_can_use(monkeypatch, works, count, device):
    """NVML counts them also where the driver is too old for this torch."""
    demo = runpy.run_path(str(ROOT / "scripts/run_demo.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: works)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert demo["device"]() == device


@pytest.fixture
def drift():
    """What is in benchmarks/drift.py."""
    return runpy.run_path(str(ROOT / "benchmarks/drift.py"))


def test_the_page_about_drift_says_what_its_numbers_say(drift):
    """benchmarks/drift.py --write makes both; numbers that ask for another default than ParallelConfig's are
    an error."""
    table, conclusion = drift["TABLE"].read(), drift["CONCLUSION"].read()
    assert table.splitlines()[:2] == drift["HEAD"] and conclusion == drift["conclusion"](table)
    assert "better in 15 of 15" in conclusion and "loses" in conclusion
    won = "\n".join(line for line in table.splitlines() if "| 1 |" not in line)
    with pytest.raises(AssertionError, match="should be extrapolate"):
        drift["conclusion"](won)


def test_the_text_about_drift_has_the_numbers_of_benchmark_and_planner(drift):
    """tests/unit/test_plan_order.py compares MEASURED with the table."""
    page = " ".join((ROOT / drift["TABLE"].page).read_text().split())
    assert f" {len(drift['PROMPTS'])} prompts, Euler, schedule shift {drift['SHIFT']:g}, float32: " in page
    assert f"**Fewer than {min(planner.MEASURED)} steps were not measured**" in page
    assert f" may take PipeFusion from {MIN_STEPS} steps on: " in page
    assert f" Under {planner.FEW_STEPS} steps it takes {planner.MAX_PATCHES} patches at most. " in page
    penalty = f"{planner.STALE:g} times as fast as an exact one, and {planner.DECIBEL:g} times more"
    assert f" {penalty} for each dB of the mean below {planner.INVISIBLE:g} " in page
