"""HunyuanVideo 1.5's super resolution in ComfyUI's template: the first steps with the enlarged video
among the model's channels, the last ones without, on what is left of the noise."""

import json

from graphs import Graph
from tiny import GOLDEN
from variants import described
from versions import skip_without_nodes
from video_conditioning import super_resolution

VARIANT = "hunyuan-video15-sr"
SEED, STEPS, SPLIT = 889, 4, 2


def sampled(g: Graph, model: list, sampler, latent: list, *parts) -> list:
    """Return the output of both parts of the schedule of ``model``, each by ``sampler`` with prompts of its
    own, in ``parts``."""
    schedule = g.one("BasicScheduler", model=model, scheduler="simple", steps=STEPS, denoise=1.0)
    split = g.add("SplitSigmas", sigmas=schedule, step=SPLIT)
    noises = g.one("RandomNoise", noise_seed=SEED), g.one("DisableNoise")
    for output, (noise, prompts) in enumerate(zip(noises, parts, strict=True)):
        positive, negative = prompts
        inputs = {"positive": positive, "negative": negative, "cfg": 1.0}
        latent = sampler(inputs, noise=noise, sigmas=[split, output], latent_image=latent)
    return latent


def test_both_parts_of_the_template(family_comfy):
    """By Parallel Sampler (Custom), and by ComfyUI's own sampler on the MODEL of Parallel Model."""
    g = Graph()
    golden = str(GOLDEN / "hunyuan-video15__euler_simple.safetensors")
    inputs = g.add("TestGoldenInputs", file=golden, change="nothing")
    prompts = [inputs, 0], [inputs, 1]
    *enlarged, latent = super_resolution(g, *prompts)
    file = family_comfy.folder / f"models/diffusion_models/{VARIANT}.safetensors"
    config = g.one("ParallelConfig", ulysses_degree=2, device="cpu")
    dit = g.one("LoadParallelDiT", config=config, model_name=file.name)
    solver = g.one("KSamplerSelect", sampler_name="euler")

    def advanced(model):
        return lambda guided, **inputs: g.one(
            "SamplerCustomAdvanced",
            guider=g.one("CFGGuider", model=model, **guided),
            sampler=solver,
            **inputs,
        )

    def custom(guided, **inputs):
        return g.one("ParallelSamplerCustom", dit=dit, sampler_name="euler", **guided, **inputs)

    theirs = g.one("TestReferenceModel", file=str(file), facts=json.dumps(described(VARIANT)))
    ours = g.one("ParallelModel", dit=dit)
    reference = sampled(g, theirs, advanced(theirs), latent, enlarged, prompts)
    outputs = [sampled(g, ours, by, latent, enlarged, prompts) for by in (custom, advanced(ours))]
    results = [g.add("TestLatentDistance", samples=output, reference=reference) for output in outputs]
    skip_without_nodes(g.nodes, family_comfy.get("/object_info"))
    run = family_comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    assert all(json.loads(run.outputs[result]["text"][0])["error"] < 1e-4 for result in results)
