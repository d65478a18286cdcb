"""Help pages, tooltips and docs/*.md say what the code does: texts, names and numbers are its own."""

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import locale_texts
import pytest
import torch
from published import H100, WAN

from backend.client import client, silence, step_timer
from backend.errors import RAN_OUT
from backend.loading.compute_dtype import compute_dtype, fast_dtypes
from backend.planner.choose import AUTO, EXACT, MEMORY, Question, choose
from backend.planner.machine import RequestEstimate
from backend.protocol.solver_names import BROWNIAN

ROOT = Path(__file__).resolve().parents[2]
HELP = ROOT / "web" / "docs"
#: Files of backend/ that say what does not fit.
MEMORY_SENTENCES = ("planner/choose.py", "rank/admission.py", "rank_plan/remedies.py", "errors.py")
#: Node -> its input of the seed.
SEEDS = {"ParallelSampler": "seed", "ParallelSamplerAdvanced": "noise_seed"}


def read(page: str) -> str:
    """A page's text with single spaces: its lines break anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@cache
def texts_of_nodes() -> set[str]:
    """Every string of the nodes' source that is not formatted."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "nodes").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def described(texts: dict) -> list[str]:
    """Descriptions and tooltips of nodes; a note ends the custom sampler's shift, which is formatted."""
    found = []
    for name, node in texts.items():
        inputs = {key: each for key, each in node.get("inputs", {}).items() if key != "shift"}
        found += [node["description"], *(each["tooltip"] for each in inputs.values() if "tooltip" in each)]
        assert found[-1], name
    return found


def test_english_texts_are_those_of_the_nodes():
    """Without a ComfyUI: tests/comfy compares all of them."""
    texts = described(locale_texts.read("en"))
    assert len(texts) > 50 and not [text for text in texts if text not in texts_of_nodes()]


@pytest.mark.parametrize("language, quantized", [("en", "a quantized file"), ("zh", "量化文件")])
def test_texts_say_that_a_lora_on_a_quantized_file_is_near_ksamplers(language, quantized):
    """The ranks hold its products next to the weights, which ComfyUI adds and quantizes again."""
    nodes = locale_texts.read(language)
    seeds = [nodes[name]["inputs"][key]["tooltip"] for name, key in SEEDS.items()]
    for text in (nodes["ParallelSampler"]["description"], *seeds):
        assert f"LoRA on {quantized}" in text or f"{quantized}上加 LoRA" in text
    for name in ("ParallelSampler", "ParallelLoRA"):
        page = f"web/docs/{name}.md" if language == "en" else f"web/docs/{name}/zh.md"
        assert ("near KSampler's" if language == "en" else "与 KSampler 的相近") in read(page), page


def test_texts_of_weight_dtype_name_gpus_without_bf16():
    """Models that list bf16 alone run in float32 on those of compute capability 7.x."""
    able = fast_dtypes(torch.device("cuda"), (7, 5))
    assert able == (torch.float16,)
    assert compute_dtype(torch.bfloat16, (torch.bfloat16,), able) == torch.float32
    tooltip = locale_texts.read("en")["LoadParallelDiT"]["inputs"]["weight_dtype"]["tooltip"]
    assert "fp32 where the GPU does not have that (compute capability 7.x has fp16 alone)" in tooltip
    assert "models that bear `bf16` alone run in `fp32` there" in read("web/docs/LoadParallelDiT.md")
    for chinese in (read("web/docs/LoadParallelDiT/zh.md"), str(locale_texts.read("zh")["LoadParallelDiT"])):
        assert "7.x" in chinese


@pytest.mark.parametrize("node", sorted(locale_texts.read("zh")))
def test_chinese_help_has_the_variables_and_nodes_of_the_english(node):
    """Names are alike in both languages: of variables, and of ComfyUI's nodes that become an input."""
    english, chinese = (read(f"web/docs/{node}{page}") for page in (".md", "/zh.md"))
    variables = re.findall(r"`([A-Z][A-Z0-9_]+)`", english)
    replaced = re.findall(r"- \*(\w+)\*", english)
    assert not [name for name in (*variables, *replaced) if name not in chinese]


def test_compile_auto_is_left_to_every_planned_method():
    """PlanChoice.plan decides it for each of them; "manual" has no PlanChoice."""
    tooltip = locale_texts.read("en")["ParallelConfig"]["inputs"]["compile"]["tooltip"]
    assert "auto: where method is not manual" in tooltip
    assert "compiled where `method` is not `manual`" in read("web/docs/ParallelConfig.md")
    long = Question(WAN, RequestEstimate(75_600, 512, 100, 2), replace(H100, memory=(80 * 10**9,) * 2), 2)
    assert {choose(long, method).plan.compile for method in (AUTO, EXACT, MEMORY)} == {"blocks"}


def test_the_sentences_about_memory_are_those_of_the_code():
    """Fragments in bold or with quotes: users look for what they read."""
    section = read("docs/faq.md").partition("## It says: does not fit")[2].partition("## ")[0]
    quoted = re.findall(r"\*\*(.+?)\*\*", section)
    assert len(quoted) == 6
    code = "".join((ROOT / "backend" / name).read_text() for name in MEMORY_SENTENCES)
    code = re.sub(r'"\s+f?"', "", code)  # strings that go on in the next line
    assert not [each for each in quoted if each not in code]
    assert f"{RAN_OUT}** in the middle of a request" in section and "three plans in all" in section
    assert "ATTEMPTS = 3" in (ROOT / "nodes/host/auto_plan.py").read_text()


def test_the_page_has_the_longest_wait_of_cancel():
    """A step that compiles is given more time than one that hangs would be."""
    compiled = f"It is {step_timer.COMPILED_SECONDS / 60:.0f} minutes where the step compiles blocks."
    assert client.CANCEL_SECONDS == 120 and client.CANCEL_STEPS == 3
    assert step_timer.EARLY_STEPS == 3 and step_timer.FIRST_SECONDS == 300
    longest = "or after three times the longest step of this model so far, if that is more."
    most = f"at most {client.CANCEL_STEPS * step_timer.FIRST_SECONDS / 60:.0f} minutes"
    early = f"In the first three steps that is three times what this one has taken, {most}."
    assert f"a step after two minutes, {longest} {early} {compiled}" in read("docs/faq.md")


def test_every_requirement_is_explained():
    """Where it is listed, weighed, and left over when the pack goes."""
    names = {
        re.split("[>;]", line)[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()
    }
    names = {name for name in names if name and not name.startswith("#")}
    pages = read("docs/dependencies.md")
    assert len(names) > 5 and not [name for name in names if f"**{name}" not in pages]
    for page in ("README.md", "docs/faq.md"):
        assert "huggingface_hub" in read(page), page


def test_pages_have_the_numbers_of_the_code():
    """And name what the code does, where a page had an older state of it."""
    assert f"the limit is {silence.START_SECONDS:.0f} s, of GPUs' ranks {silence.MAX_SECONDS:.0f} s" in read(
        "docs/reliability.md"
    )
    on_host, on_gpu = read("docs/design/host.md").partition("it is that of a Brownian path")[::2]
    on_host, on_gpu = on_host[-150:], on_gpu[:400]
    assert all(f"`{name}`" in on_host for name in BROWNIAN) and "`er_sde`" in on_gpu
    for page in ("docs/dependencies.md", "web/docs/ParallelConfig.md"):
        assert "in about ten seconds" in read(page), page
    assert "nor where the model is called once" in read("docs/models.md")


def test_readme_and_performance_page_have_the_same_runs():
    """Those over NCCL, in two sessions on one GPU."""
    performance = read("docs/performance.md")
    exact, stale = re.findall(r"families (\d+) runs of exact methods .*?; (\w+) of PipeFusion", performance)[
        0
    ]
    page = read("docs/design/communication.md")
    assert f"{exact} runs of exact methods over NCCL" in page and f"{stale} of PipeFusion" in page
    assert "two short sessions" in performance and "one H200, two short sessions" in read("README.md")


def test_pages_begin_with_what_is_asked_of_readers():
    """And long lists have pages of their own."""
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    assert headings[0] == "Send numbers of your GPUs"
    assert len((ROOT / "docs/models.md").read_text().splitlines()) < 350
    recipes = [page for page in PAGES if "run twice" in page.read_text(encoding="utf-8")]
    assert [page.name for page in recipes] == ["faq.md"]


def test_the_recipe_for_a_loras_text_encoder_is_on_both_pages():
    """Parallel LoRA has no CLIP: LoraLoader on Parallel Model's MODEL, which then changes CLIP alone."""
    assert "clip" not in locale_texts.read("en")["ParallelLoRA"]["inputs"]
    for page in ("docs/faq.md", "web/docs/ParallelLoRA.md", "web/docs/ParallelLoRA/zh.md"):
        text = read(page)
        assert "*LoraLoader*" in text and re.search(r"`strength_model` (为 )?0", text), page


# ---------------------------------------------------------------------- links
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *HELP.rglob("*.md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.replace(" ", "-") for each in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_pages_and_headings_are_there(page):
    """Below this folder; others are not looked up."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(link)
    assert not missing
