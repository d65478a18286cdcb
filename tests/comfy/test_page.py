"""The pack in ComfyUI's page, in a headless Chromium: what somebody who uses it sees and does."""

import re
import time
from itertools import count

import pytest
from browser import program
from page import CONFIG, MESSAGE, ComfyPage
from servers import comfy_over

from backend.config import ParallelConfig

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium (apt-get install chromium, or set CHROMIUM to its path)"
)
#: Seconds, where ranks start again and again.
LONG = 900
#: Steps of the demo, fewer than its own.
STEPS = 4
#: Another for each run, so that none is found in ComfyUI's cache.
SEEDS = count(1000)
#: Least contrast of text of any size (WCAG 2, level AA).
CONTRAST = 4.5
#: Zoom at which a graph that was opened from its card fills three quarters of the window, with a margin.
FITTED = """() => {
  const boxes = app.graph.nodes.map(({ pos: [x, y], size: [w, h] }) => [x, y - 30, x + w, y + h]);
  const size = [0, 1].map((axis) => Math.max(...boxes.map((box) => box[axis + 2]))
    - Math.min(...boxes.map((box) => box[axis])) + 20);
  return 0.75 * Math.min(innerWidth / size[0], innerHeight / size[1]);
}"""
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
    empty.set("ParallelSampler", "steps", STEPS)
    empty.set("ParallelSampler", "seed", next(SEEDS))
    empty.run()
    return empty


def _status(page) -> dict:
    return page.evaluate("fetch('/parallel_dit/status').then((found) => found.json())")


def _search(page, words: str):
    for _ in range(20):  # a click is lost while the page still lays something out
        page.click_at(200, 860, count=2)  # where no search result appears under the mouse
        if page.becomes("document.activeElement.getAttribute('aria-controls') === 'results-list'", 3):
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
        empty.put_down()
        empty.call("(place) => { app.graph.nodes.at(-1).pos = place; }", place)
    empty.evaluate(
        "app.canvas.ds.scale = 0.8; app.canvas.ds.offset = [200, 200]; app.canvas.draw(true, true)"
    )
    empty.drag(empty.slot("ParallelConfig", "config", False), empty.slot("LoadParallelDiT", "config", True))
    empty.wait("app.graph.nodes.find((each) => each.type === 'LoadParallelDiT').inputs[0].link !== null", 30)


def test_a_mistake_is_read_in_the_toast(empty):
    empty.template("demo")
    empty.set("ParallelConfig", "cfg_degree", 3)
    empty.press_run()
    empty.has_text(
        "cfg_degree is 3, but guidance has two branches (positive and negative); set it to 1 or 2."
    )


def test_what_only_headers_tell_is_read_under_the_node(empty):
    """And while they are read, which takes a process its imports, the node says so."""
    empty.template("demo")
    empty.set("ParallelConfig", "cfg_degree", 1)
    empty.set("ParallelConfig", "pipefusion_degree", 7)
    empty.press_run()
    text = """app.graph.nodes.find((node) => node.type === "LoadParallelDiT").widgets
      .find(({ name }) => name === "$$node-text-preview")?.value ?? "" """
    empty.wait(f'({text}) === "reading the model\'s headers"')
    empty.wait(f"({text}).includes('has 6 blocks')")
    empty.has_text("pipefusion_degree is 7")


def test_a_template_is_opened_from_its_card_and_queued(empty):
    empty.open_card("demo")
    # fitted into the window so that the classic canvas draws texts (test_a_template_opens_with_texts)
    empty.wait(f"Math.abs(app.canvas.ds.scale - ({FITTED})()) < 0.001 && !app.canvas.low_quality", 30)
    empty.set("ParallelSampler", "steps", STEPS)
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


@RENDERERS
def test_the_report_stays(demo, nodes2):
    """Under its nodes, of which the loader was cached, when another tab was looked at, and when the page is
    loaded again."""
    demo.use(nodes2)
    before = demo.reports()
    assert before.keys() == {"LoadParallelDiT", "ParallelSampler"}
    assert f"{STEPS} steps in " in before["ParallelSampler"]
    _leave(demo)
    demo.tab(-2)
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    assert demo.reports() == before
    demo.load()
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    assert demo.reports() == before
    for node, text in before.items():
        demo.show(node)
        demo.has_text(text.splitlines()[0])


def test_a_run_that_ends_in_another_tab_reports_to_its_own(demo):
    """Also where the tab that is open has the same nodes."""
    _begin(demo, 60)
    _leave(demo)
    demo.template("demo")
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    demo.wait_for_queue()
    demo.wait(f"Object.values(sessionStorage).some((text) => text.startsWith('{60} steps in '))", 30)
    assert not any(demo.reports().values())
    demo.tab(-3)
    demo.wait("app.graph.nodes.some((node) => node.type === 'ParallelSampler')")
    assert demo.reports()["ParallelSampler"].startswith("60 steps in ")


def test_a_run_is_compared_with_one_rank(demo):
    """By what auto has measured until one rank has run the same, and by that from then on."""
    two = {"method": "manual", "cfg_degree": 2}

    def ran(**config) -> str:
        for name, value in {"device": "cpu", "gpus": "", **config}.items():
            demo.set("ParallelConfig", name, value)
        demo.set("ParallelSampler", "seed", next(SEEDS))
        demo.run()
        demo.show("ParallelSampler")
        report = demo.reports()["ParallelSampler"]
        demo.has_text(report.splitlines()[-1])
        return report

    assert ran(method="auto", cfg_degree=1, gpus="2").startswith("auto: ")
    demo.set("EmptySD3LatentImage", "width", 128)  # which no other test has on one rank
    assert re.search(r"(?m)· 2 ranks · about \d\.\dx one rank \(projected\)$", ran(**two))
    assert ran(method="manual", cfg_degree=1).endswith("· 1 rank")
    assert re.search(r"(?m)· 2 ranks · \d\.\dx one rank$", ran(**two))


def _leave(page):
    page.evaluate("app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    page.wait("app.graph.nodes.every((node) => node.type !== 'ParallelSampler')")


def _begin(page, steps: int):
    """Press Run for so many steps, and wait for the first of them."""
    page.set("ParallelSampler", "steps", steps)
    page.set("ParallelSampler", "seed", next(SEEDS))
    page.press_run()
    page.wait("fetch('/parallel_dit/status').then((r) => r.json()).then((s) => s.doing.startsWith('step '))")


def test_a_saved_graph_is_the_same_when_it_is_opened(demo):
    queued = "app.graphToPrompt().then(({ output }) => output)"
    before = demo.evaluate(queued)
    saved = demo.evaluate("JSON.stringify(app.graph.serialize())")
    demo.clear()
    demo.call("(saved) => app.loadGraphData(JSON.parse(saved))", saved)
    assert demo.evaluate(queued) == before


@RENDERERS
def test_cancel_leaves_a_line_and_the_ranks(demo, nodes2):
    demo.use(nodes2)
    _begin(demo, 1000)
    demo.evaluate("fetch('/interrupt', { method: 'POST' })")
    demo.wait_for_queue()
    demo.wait_for_report("ParallelSampler", "cancelled")
    (backend,) = _status(demo)["backends"]
    assert backend["running"] == "" and backend["models"] == ["shapes-flux"]
    demo.wait("Object.values(sessionStorage).includes('cancelled')", 30)
    demo.load()
    demo.wait_for_report("ParallelSampler", "cancelled")
    demo.show("ParallelSampler")
    demo.has_text("cancelled")


@RENDERERS
def test_reports_fit_into_their_nodes(demo, nodes2):
    """As long as they get: auto's choice, its runners-up, eight ranks."""
    demo.use(nodes2)
    time.sleep(1)  # the nodes are laid out anew
    assert demo.overlaps() == []
    assert demo.cut("LoadParallelDiT") == demo.cut("ParallelSampler") == 0
    long = [
        "for 1024 x 1024 (assumed), 20 steps, cfg 4.0:",
        "auto: cfg_degree 2 x ulysses_degree 4, shares 14,14,14,14,11,11,11,11. about 6.1x one GPU "
        "(projected), about 20.3 GB of 24.0 GB per GPU, same result as one GPU.",
        *(f"GPU {number} · 12.3 of 24 GiB · blocks {7 * number}-{7 * number + 6}" for number in range(8)),
        "1024 x 1024 (assumed), 20 steps, cfg 4.0: about 63.4 MB more · sends 1.0 MB a step",
    ]
    demo.report("LoadParallelDiT", "\n".join(long))
    time.sleep(1)
    assert demo.overlaps() == [] and demo.cut("LoadParallelDiT") == 0


@RENDERERS
def test_no_template_has_nodes_over_others_and_its_note_is_read(empty, nodes2):
    empty.use(nodes2)
    names = empty.evaluate("fetch('/api/workflow_templates').then((r) => r.json())")["parallel-dit"]
    assert len(names) > 30
    found = {}
    notes = {}
    without_texts = []
    for name in names:
        empty.template(name)
        if empty.evaluate("app.canvas.low_quality"):
            without_texts.append(name)
        found[name] = empty.overlaps()
        notes[name] = empty.note()
    assert without_texts == []
    assert {name: pairs for name, pairs in found.items() if pairs} == {}
    assert all("GPUs" in note["text"] for note in notes.values())
    cut_or_dim = {name: n for name, n in notes.items() if n["cut"] > 1 or n["contrast"] < CONTRAST}
    assert cut_or_dim == {}


def test_the_benchmark_writes_the_best_config(demo):
    """Of those with the shares that the graph has set. A button takes it back."""
    demo.set("ParallelConfig", "shares", "70,30")
    before = demo.evaluate(CONFIG)
    demo.open_panel()
    demo.click(".pdit-benchmark")
    demo.wait(f"{MESSAGE}.startsWith('best: ')", LONG)
    rows = demo.evaluate("[...document.querySelectorAll('.pdit tr')].map((row) => row.innerText)")
    assert len(rows) >= 4 and rows[-1].startswith("one rank")
    assert all("shares 70,30" in row and re.search(r", \d+\.\dx one rank$", row) for row in rows[:-1]), rows
    values = demo.evaluate(CONFIG)
    assert values.pop("method") == "manual"
    config = ParallelConfig(**values).validate()
    assert config.shares == ("70,30" if config.world_size == 2 else "")
    assert "whose method is manual now and gpus empty" in demo.evaluate(MESSAGE)
    demo.click(".pdit-back")
    demo.wait(f"{MESSAGE}.startsWith('Parallel Config is as it was')", LONG)
    assert demo.evaluate(CONFIG) == before and not demo.evaluate("!!document.querySelector('.pdit-back')")


def test_the_benchmark_writes_into_its_own_workflow_alone(demo):
    demo.open_panel()
    before = demo.evaluate(CONFIG)
    demo.click(".pdit-benchmark")
    demo.wait(f"{MESSAGE}.startsWith('1 of ')", LONG)
    demo.evaluate("void (app.graph.id = crypto.randomUUID())")  # as another one that is opened
    demo.wait(f"{MESSAGE}.startsWith('best: ')", LONG)
    assert "not written" in demo.evaluate(MESSAGE) and demo.evaluate(CONFIG) == before


def test_a_benchmark_stops_though_its_prompt_is_gone(demo):
    """Deleted from the queue, it has no event; and no other prompt is interrupted."""
    demo.open_panel()
    demo.evaluate(
        """void (window.posted = [], window.fetched = app.api.fetchApi);
        app.api.fetchApi = (path, options) => {
          if (options?.method === 'POST') posted.push([path, options.body]);
          return path === '/prompt' && options?.method === 'POST'
            ? Promise.resolve(new Response(JSON.stringify({ prompt_id: 'gone' })))
            : fetched.call(app.api, path, options);
        };
        null"""
    )
    demo.click(".pdit-benchmark")
    demo.wait(f"{MESSAGE}.startsWith('1 of ')", LONG)
    demo.wait("posted.some(([path]) => path === '/prompt')")
    demo.click(".pdit-benchmark")
    demo.wait(f"{MESSAGE} === 'stopped'")
    posted = demo.evaluate("app.api.fetchApi = fetched, posted.slice(-2)")
    assert posted == [["/queue", '{"delete":["gone"]}'], ["/interrupt", '{"prompt_id":"gone"}']]


@pytest.mark.parametrize("nodes, asks", [("", False), ("ParallelConfig", True)], ids=["none", "one"])
def test_only_graphs_with_our_nodes_ask_for_the_queue(empty, nodes, asks):
    asked = empty.evaluate(
        f"""(() => {{
          if ('{nodes}') app.graph.add(LiteGraph.createNode('{nodes}'));
          const asked = [], fetched = app.api.fetchApi;
          app.api.fetchApi = (path, ...rest) => (asked.push(path), fetched.call(app.api, path, ...rest));
          app.api.dispatchEvent(new CustomEvent('execution_start', {{ detail: {{ prompt_id: 'none' }} }}));
          app.api.fetchApi = fetched;
          return asked;
        }})()"""
    )
    assert ("/queue" in asked) == asks


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
