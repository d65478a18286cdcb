"""Numbers that nodes of a queued graph compute of others before it runs, and long chains of nodes."""

import pytest
from latent_graphs import IMAGES, after, node
from without_comfy import on_stand_ins


@pytest.fixture(scope="module")
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
        yield module


def expression(text: str, **values) -> dict:
    return node("ComfyMathExpression", expression=text, **{f"values.{n}": v for n, v in values.items()})


@pytest.mark.parametrize(
    "text, steps",
    [
        ("a/2", 10),
        ("a * b + 1", 61),
        ("(a // 8) * 8", 16),
        ("max(((a + 15) // 16) * 16, 256)", 256),
        ("a & -8", 16),
        ("a & ~1", 20),
        ("floor(a/3)*3", 18),
        ("max(5, round(a * b)) + (5 - (max(5, round(a * b)) % 17)) % 17", 73),
        ("a / 0", None),
        ("a * 1e999", None),
        ("a +", None),
        ("a ** 2", None),
        ("sqrt(a)", None),
        ("round(a / 3, 1) * 10", 67),
        ("round(1, -1000000000)", None),
        ("round(a / 3, 1000000000)", None),
        ("c", None),
        ("word", None),
        ("run", None),
        ("itself", None),
        ("a.real", None),
        ("__import__('os').getpid()", None),
        ("a" + "+a" * 200, None),
    ],
)
def test_what_an_expression_computes_is_followed(graph, text, steps):
    """Half of the width, and seconds times frames, as LTX-2.3's template has them."""
    unknown = {"word": "x", "run": ["run", 0], "itself": ["steps", 1]}
    values = {"a": ["twenty", 0], "b": 3} | {name: link for name, link in unknown.items() if name == text}
    prompt = after(
        twenty=node("PrimitiveInt", value=20), run=node("Length"), steps=expression(text, **values)
    )
    prompt["sampler"]["inputs"]["steps"] = ["steps", 1]
    assert graph.request_of_graph(prompt, "1", IMAGES).steps == (steps or 20)


@pytest.mark.parametrize(
    "inputs, tokens",
    [
        (("1:1 (Square)", 1.0, 8), 64 * 64),
        (("16:9 (Widescreen)", 1.0, 8), 86 * 48),
        (("9:16 (Portrait Widescreen)", 2.0, 64), 68 * 120),
        (("21:9 (Ultrawide)", ["megapixels", 0], 32), 138 * 60),
        (("wide", 1.0, 8), 64 * 64),
        (("1:1 (Square)", ["run", 0], 8), 64 * 64),
        (("1:1 (Square)", 2.0, 0), 64 * 64),
    ],
)
def test_the_sides_that_a_ratio_has_are_followed(graph, inputs, tokens):
    """Resolution Selector, which many of ComfyUI's templates have, counted as 1024 x 1024."""
    named = dict(zip(("aspect_ratio", "megapixels", "multiple"), inputs))
    prompt = after(megapixels=node("PrimitiveFloat", value=2.0), run=node("Length"))
    prompt["ratio"] = node("ResolutionSelector", **named)
    prompt["0"] = node("EmptySD3LatentImage", width=["ratio", 0], height=["ratio", 1], batch_size=1)
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == tokens


#: Each has two links to the one before it, so paths through so many of them are 10**18.
CHAINED = 60


def test_a_chain_of_sums_is_computed_once(graph):
    """And one of switches: every link was followed anew, and ComfyUI stood still."""
    first = {"sum0": node("PrimitiveFloat", value=20 / 2**CHAINED), "switch0": node("LoadParallelDiT")}
    prompt = after(**first, run=node("Length"))
    for index in range(1, CHAINED + 1):
        before = [f"sum{index - 1}", 0]
        prompt[f"sum{index}"] = expression("a + b", a=before, b=before)
        links = {"on_false": [f"switch{index - 1}", 0], "on_true": [f"switch{index - 1}", 0]}
        prompt[f"switch{index}"] = node("ComfySwitchNode", switch=["run", 0], **links)
    prompt["sampler"]["inputs"] |= {"steps": [f"sum{CHAINED}", 1], "dit": [f"switch{CHAINED}", 0]}
    assert graph.request_of_graph(prompt, "switch0", IMAGES).steps == 20


@pytest.mark.parametrize("length, steps", [(CHAINED, 7), (1000, 20)])
def test_a_longer_chain_takes_a_run(graph, length, steps):
    """Rather than all of Python's stack."""
    prompt = after(steps0=node("PrimitiveInt", value=7))
    for index in range(length):
        prompt[f"steps{index + 1}"] = expression("a", a=[f"steps{index}", 1])
    prompt["sampler"]["inputs"]["steps"] = [f"steps{length}", 1]
    assert graph.request_of_graph(prompt, "1", IMAGES).steps == steps


@pytest.mark.parametrize(
    "kind, inputs, batch",
    [
        ("LatentBatch", {"samples1": ("latent", 0), "samples2": ("latent", 0)}, 2**CHAINED),
        ("ImageScale", {"image": ("latent", 0), "width": ("size", 0), "height": ("size", 1)}, 1),
    ],
)
def test_a_chain_of_latents_is_sized_once(graph, kind, inputs, batch):
    prompt = after()
    prompt["latent0"] = node("EmptySD3LatentImage", width=1024, height=512)
    for index in range(CHAINED):
        links = {name: [f"{before}{index}", output] for name, (before, output) in inputs.items()}
        prompt[f"size{index}"] = node("GetImageSize", image=[f"latent{index}", 0])
        prompt[f"latent{index + 1}"] = node(kind, **links)
    prompt["sampler"]["inputs"]["latent_image"] = [f"latent{CHAINED}", 0]
    request = graph.request_of_graph(prompt, "1", IMAGES)
    assert (request.batch, request.image_tokens) == (batch, 64 * 32)
