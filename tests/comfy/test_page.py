"""The pack in ComfyUI's page, in a headless Chromium: what somebody who uses it sees and does."""

import time
from itertools import count

import pytest
from browser import program
from page import ComfyPage
from servers import comfy_over

from backend.config import ParallelConfig

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium (apt-get install chromium, or set CHROMIUM to its path)"
)
#: Steps of the demo, fewer than its own.
STEPS = 4
#: Another for each run, so that none is found in ComfyUI's cache.
SEEDS = count(1000)
RENDERERS = pytest.mark.parametrize("nodes2", [False, True], ids=["canvas", "nodes 2.0"])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with comfy_over(tmp_path_factory.mktemp("page")) as server:
        page = ComfyPage(server)
        yield page
        page.close()


@pytest.fixture
def empty(page):
    page.use(nodes2=False)
    page.clear()
    return page


@pytest.fixture
def demo(empty):
    """The demo, opened and as short as it may be, which has run: ranks start for the first test alone."""
    empty.template("demo")
    _set(empty, "ParallelSampler", "steps", STEPS)
    _set(empty, "ParallelSampler", "seed", next(SEEDS))
    empty.run()
    return empty


def _set(page, node: str, widget: str, value):
    page.call(
        """(type, name, value) => {
          const node = app.graph.nodes.find((each) => each.type === type);
          node.widgets.find((each) => each.name === name).value = value;
        }""",
        node,
        widget,
        value,
    )


def _status(page) -> dict:
    return page.evaluate("fetch('/parallel_dit/status').then((found) => found.json())")


def _search(page, words: str):
    for _ in range(3):  # a click is lost while the page still lays something out
        page.click_at(200, 860, count=2)  # where no search result appears under the mouse
        if page.becomes("document.activeElement.getAttribute('aria-controls') === 'results-list'", 30):
            break
    page.type(words)


@pytest.mark.parametrize("words", ["multi gpu", "ulysses", "xdit"])
def test_search_finds_the_nodes(empty, words):
    _search(empty, words)
    empty.has_text("Load Parallel DiT")


def test_nodes_are_added_and_connected_by_hand(empty):
    for name, place in (("Parallel Config", [0, 0]), ("Load Parallel DiT", [500, 0])):
        before = empty.evaluate("app.graph.nodes.length")
        _search(empty, name)
        empty.wait(f"document.querySelector('#results-list [role=option]')?.innerText.includes('{name}')")
        empty.press("Enter", 13)
        empty.wait(f"app.graph.nodes.length === {before + 1}")
        empty.click_at(1200, 760)  # where a new node follows the mouse it is put down
        empty.call("(place) => { app.graph.nodes.at(-1).pos = place; }", place)
    empty.evaluate(
        "app.canvas.ds.scale = 0.8; app.canvas.ds.offset = [200, 200]; app.canvas.draw(true, true)"
    )
    empty.drag(empty.slot("ParallelConfig", "config", False), empty.slot("LoadParallelDiT", "config", True))
    empty.wait("app.graph.nodes.find((each) => each.type === 'LoadParallelDiT').inputs[0].link !== null", 30)


def test_a_mistake_is_read_in_the_toast(empty):
    empty.template("demo")
    _set(empty, "ParallelConfig", "cfg_degree", 3)
    empty.click("button", "Run")
    empty.has_text(
        "cfg_degree is 3, but guidance has two branches (positive and negative); set it to 1 or 2."
    )


def test_a_template_is_opened_from_its_card_and_queued(empty):
    empty.click(".templates-tab-button")
    empty.click("[role=dialog] *", "parallel-dit")
    empty.click("[role=dialog] [data-testid='template-workflow-demo']")
    empty.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    _set(empty, "ParallelSampler", "steps", STEPS)
    empty.run()
    assert f"{STEPS} steps in " in empty.reports()["ParallelSampler"]


def test_the_panel_shows_ranks_and_their_last_request(demo):
    demo.open_panel()
    demo.has_text("Last run")
    (backend,) = _status(demo)["backends"]
    ranks = len(backend["ranks"])
    assert backend["models"] == ["shapes-flux"] and {rank["state"] for rank in backend["ranks"]} == {"ready"}
    demo.wait(f"document.querySelectorAll('.pdit .step').length === {ranks * STEPS}", 30)
    for rank in backend["ranks"]:
        times = [step for step in rank["steps"] if step[0] == rank["steps"][-1][0]]
        assert [step[1] for step in times] == list(range(STEPS))
        assert all(0 <= waited <= seconds for _, _, _, seconds, waited, _ in times)
        assert sum(step[5] for step in times) > 0


def test_the_report_stays(demo):
    """Under its nodes when another tab was looked at, and when the page is loaded again."""
    before = demo.reports()
    assert before.keys() == {"LoadParallelDiT", "ParallelSampler"}
    demo.evaluate("app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    demo.wait("app.graph.nodes.every((node) => node.type !== 'ParallelSampler')")
    demo.evaluate(
        """(() => {
          const { workflow } = app.extensionManager;
          const isDemo = (each) => each !== workflow.activeWorkflow && each.path.includes('demo');
          const demo = workflow.openWorkflows.findLast(isDemo);
          return app.loadGraphData(demo.activeState, true, true, demo);
        })()"""
    )
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    assert demo.reports() == before
    demo.load()
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    assert demo.reports() == before


def test_a_saved_graph_is_the_same_when_it_is_opened(demo):
    queued = "app.graphToPrompt().then(({ output }) => output)"
    before = demo.evaluate(queued)
    saved = demo.evaluate("JSON.stringify(app.graph.serialize())")
    demo.clear()
    demo.call("(saved) => app.loadGraphData(JSON.parse(saved))", saved)
    assert demo.evaluate(queued) == before


def test_cancel_leaves_a_line_and_the_ranks(demo):
    _set(demo, "ParallelSampler", "steps", 1000)
    demo.click("button", "Run")
    demo.wait("fetch('/parallel_dit/status').then((r) => r.json()).then((s) => s.doing.startsWith('step '))")
    demo.evaluate("fetch('/interrupt', { method: 'POST' })")
    demo.wait_for_queue()
    demo.has_text("cancelled")
    (backend,) = _status(demo)["backends"]
    assert backend["running"] == "" and backend["models"] == ["shapes-flux"]


@RENDERERS
def test_reports_fit_into_their_nodes(demo, nodes2):
    demo.use(nodes2)
    time.sleep(1)  # the nodes are laid out anew
    assert demo.overlaps() == []


@RENDERERS
def test_no_template_has_nodes_over_others(empty, nodes2):
    empty.use(nodes2)
    names = empty.evaluate("fetch('/api/workflow_templates').then((r) => r.json())")["parallel-dit"]
    assert len(names) > 30
    found = {}
    for name in names:
        empty.template(name)
        found[name] = empty.overlaps()
    assert {name: pairs for name, pairs in found.items() if pairs} == {}


def test_the_benchmark_writes_the_best_config(demo):
    demo.open_panel()
    demo.click(".pdit-benchmark")
    demo.wait("document.querySelector('.pdit-message').textContent.startsWith('best: ')")
    rows = demo.evaluate("[...document.querySelectorAll('.pdit tr')].map((row) => row.innerText)")
    assert len(rows) >= 4 and rows[-1].startswith("one rank")
    values = demo.evaluate(
        """Object.fromEntries(app.graph.nodes.find((node) => node.type === 'ParallelConfig')
          .widgets.map(({ name, value }) => [name, value]))"""
    )
    assert values.pop("method") == "manual"
    ParallelConfig(**values).validate()


def test_buttons_free_and_stop(demo):
    demo.open_panel()
    demo.click(".pdit-free")
    demo.has_text("freed the weights of 1 model")
    demo.wait("fetch('/parallel_dit/status').then((r) => r.json()).then((s) => !s.backends[0].models.length)")
    demo.click(".pdit-open")
    demo.wait("document.querySelector('.pdit > pre').innerText.includes('rank')")
    demo.click(".pdit-stop")
    demo.has_text("the ranks have ended")
    assert _status(demo)["backends"] == []
