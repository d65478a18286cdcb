"""Advanced inputs of Parallel Config on the classic canvas: folded away under a button (web/advanced.js)."""

import json
from itertools import count

import pytest
from browser import program
from page import ComfyPage
from servers import comfy_over

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium (apt-get install chromium, or set CHROMIUM to its path)"
)
NODE = "app.graph.nodes.find(({ type }) => type === 'ParallelConfig')"
BUTTON = "advanced inputs"
BASIC = ["device", "gpus", "method"]
#: Inputs that are drawn, and the button, in their order.
SHOWN = f"{NODE}.widgets.filter((each) => {NODE}.isWidgetVisible(each)).map(({{ name }}) => name)"
#: Inputs of the node in the order in which graphs save their values.
SAVED = f"{NODE}.widgets.filter(({{ serialize }}) => serialize !== false).map(({{ name }}) => name)"
QUEUED = "app.graphToPrompt().then(({ output }) => output)"
IDS = count(100)
ALWAYS = "Comfy.Node.AlwaysShowAdvancedWidgets"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with comfy_over(tmp_path_factory.mktemp("page")) as server:
        page = ComfyPage(server)
        page.becomes("!!document.querySelector('[role=dialog]')", 10)  # which a first visit opens
        yield page
        page.close()


@pytest.fixture
def config(page):
    """A page with one Parallel Config."""
    page.use(nodes2=False)
    page.clear()
    # with an id of its own: the page keeps values by ids, also of a graph that was cleared
    page.call(
        """(id) => {
          const node = LiteGraph.createNode('ParallelConfig');
          Object.assign(node, { id, pos: [0, 0] });
          app.graph.add(node);
        }""",
        next(IDS),
    )
    page.show("ParallelConfig")
    return page


def _press_button(page):
    """Click the button where it is drawn."""
    page.evaluate("app.canvas.draw(true, true)")
    x, y = page.evaluate(
        f"""(() => {{
          const node = {NODE};
          const {{ y }} = node.widgets.find(({{ name }}) => name === '{BUTTON}');
          const {{ scale, offset }} = app.canvas.ds;
          const place = app.canvas.canvas.getBoundingClientRect();
          return [(node.pos[0] + node.size[0] / 2 + offset[0]) * scale + place.left,
                  (node.pos[1] + y + 10 + offset[1]) * scale + place.top];
        }})()"""
    )
    page.click_at(x, y)


def _shows(page, names: list[str]):
    """Wait until the canvas has drawn these inputs alone, one below the other, in a node of their height."""
    page.evaluate("app.canvas.draw(true, true)")
    page.wait(f"JSON.stringify({SHOWN}) === {json.dumps(json.dumps(names, separators=(',', ':')))}", 30)
    page.evaluate("app.canvas.draw(true, true)")
    places = page.evaluate(
        f"{NODE}.widgets.filter(({{ name }}) => {SHOWN}.includes(name)).map(({{ y }}) => y)"
    )
    steps = {after - before for before, after in zip(places, places[1:])}
    assert len(steps) == 1, places
    height = page.evaluate(f"{NODE}.size[1]")
    assert places[-1] < height < places[-1] + 60


def test_a_button_shows_and_hides_them(config):
    every = config.evaluate(SAVED)
    assert len(every) == 21
    _shows(config, [*BASIC, BUTTON])
    _press_button(config)
    _shows(config, [*every, BUTTON])
    _press_button(config)
    _shows(config, [*BASIC, BUTTON])


def test_what_is_set_or_linked_stays_in_sight(config):
    config.set("ParallelConfig", "wire", "fp8")
    _shows(config, [*BASIC, "wire", BUTTON])
    linked = config.evaluate(
        f"""(() => {{
          const number = LiteGraph.createNode('PrimitiveInt');
          app.graph.add(number);
          const node = {NODE};
          return !!number.connect(0, node, node.findInputSlot('ring_degree'));
        }})()"""
    )
    assert linked
    _shows(config, ["ring_degree", *BASIC, "wire", BUTTON])


def test_slots_of_folded_inputs_take_no_links(config):
    """They would lie over each other, where the button is."""
    _shows(config, [*BASIC, BUTTON])
    heights = config.evaluate(f"{NODE}.inputs.map(({{ name, pos }}) => [name, pos[1]])")
    assert {name for name, y in heights if 0 < y < 1000} == set(BASIC)


def test_the_state_is_saved_and_the_values_are_as_before(config):
    """Those of a graph from before there was a button, with the height of all its inputs, too."""
    config.set("ParallelConfig", "ulysses_degree", 2)
    folded = config.evaluate(f"{NODE}.serialize()")
    assert len(folded["widgets_values"]) == 21 and not folded.get("showAdvanced")
    queued = config.evaluate(QUEUED)
    _press_button(config)
    every = config.evaluate(SAVED)
    _shows(config, [*every, BUTTON])
    unfolded = config.evaluate(f"{NODE}.serialize()")
    assert unfolded["widgets_values"] == folded["widgets_values"] and unfolded["showAdvanced"]
    assert config.evaluate(QUEUED) == queued
    saved = config.evaluate("JSON.stringify(app.graph.serialize())")
    before = json.loads(saved)
    before["nodes"][0] |= {"showAdvanced": None, "size": [300, 548]}
    in_sight = ["ulysses_degree", *BASIC, BUTTON]
    for graph, shown in ((saved, [*every, BUTTON]), (json.dumps(before), in_sight)):
        config.clear()
        config.call("(saved) => app.loadGraphData(JSON.parse(saved))", graph)
        config.show("ParallelConfig")
        _shows(config, shown)
        assert config.evaluate(QUEUED) == queued
        assert config.evaluate(f"{NODE}.serialize().widgets_values") == folded["widgets_values"]


def test_a_height_that_somebody_gave_stays(config):
    config.evaluate(f"{NODE}.setSize([300, 300])")
    saved = config.evaluate("JSON.stringify(app.graph.serialize())")
    config.clear()
    config.call("(saved) => app.loadGraphData(JSON.parse(saved))", saved)
    assert config.evaluate(f"[...{NODE}.size]") == [300, 300]


def test_the_pages_own_setting_and_nodes_2_go_without_the_button(config):
    config.evaluate(f"app.extensionManager.setting.set('{ALWAYS}', true)")
    try:
        _shows(config, config.evaluate(SAVED))
    finally:
        config.evaluate(f"app.extensionManager.setting.set('{ALWAYS}', false)")
    config.use(nodes2=True)
    config.has_text("Show advanced inputs")  # ComfyUI's own
    assert "show advanced inputs" not in config.evaluate("document.body.innerText")
