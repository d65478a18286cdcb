"""ComfyUI's page in a browser of its own: what tests do with it, and what they read from it."""

import json

from browser import Page
from comfy_server import ComfyServer

#: Is everything there: the graph, this pack's nodes and its tab?
READY = (
    "!!(window.app?.graph && window.LiteGraph?.registered_node_types.ParallelConfig"
    " && document.querySelector('.parallel-dit-tab-button'))"
)
#: Bounds of each node as they are drawn, title too, in the graph's units.
BOUNDS = """() => {
  const { ds, canvas } = app.canvas;
  const place = canvas.getBoundingClientRect();
  return app.graph.nodes.map((node) => {
    const drawn = LiteGraph.vueNodesMode && document.querySelector(`[data-node-id="${node.id}"]`);
    if (LiteGraph.vueNodesMode && !drawn) return null;
    const title = LiteGraph.NODE_TITLE_HEIGHT;
    let [x, y, width, height] = [node.pos[0], node.pos[1] - title, node.size[0], node.size[1] + title];
    if (drawn) {
      const box = drawn.getBoundingClientRect();
      [width, height] = [box.width / ds.scale, box.height / ds.scale];
      x = (box.left - place.left) / ds.scale - ds.offset[0];
      y = (box.top - place.top) / ds.scale - ds.offset[1];
    }
    return { title: `${node.title} (${node.id})`, x, y, width, height };
  });
}"""
#: Of every note that is drawn: its text, how many pixels of it are cut off, and the least contrast of its
#: letters (WCAG 2: the ratio of luminances).
NOTES = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const isSolid = (colour) => numbers(colour).length < 4 || numbers(colour)[3] === 1;
  const luminance = (colour) => {
    const parts = numbers(colour).slice(0, 3).map((value) => value / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {  // what is solid; in a node of the canvas that is the node's own colour
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (each.matches(".comfy-markdown") && !isSolid(colour)) return "rgb(102, 85, 51)";
      if (isSolid(colour)) return colour;
    }
  };
  const contrast = (element) => {
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  return [...document.querySelectorAll(".comfy-markdown-content, .comfy-markdown .tiptap")].map((note) => ({
    text: note.innerText,
    cut: Math.max(0, note.scrollHeight - note.clientHeight, note.scrollWidth - note.clientWidth),
    contrast: Math.min(...[...note.querySelectorAll("*")].map(contrast)),
  }));
}"""
#: Of this pack's reports that are drawn: type of the node, and how many pixels of the text are cut off.
CUT = """() => app.graph.nodes.flatMap(({ type, widgets }) => (widgets ?? [])
  .filter(({ isReport, element }) => isReport && element.clientHeight)
  .map(({ element }) => [type, Math.max(0, element.scrollHeight - element.clientHeight)]))"""
#: Values of the inputs of the graph's Parallel Config.
CONFIG = """Object.fromEntries(app.graph.nodes.find(({ type }) => type === 'ParallelConfig')
  .widgets.filter(({ serialize }) => serialize !== false).map(({ name, value }) => [name, value]))"""
#: The message of the side panel.
MESSAGE = "document.querySelector('.pdit-message').textContent"
#: Text of this pack's reports, by the type of the node.
REPORTS = """() => Object.fromEntries(app.graph.nodes.flatMap(({ type, widgets }) =>
  (widgets ?? []).filter(({ isReport }) => isReport).map(({ value }) => [type, value])))"""
#: How often the page has asked its server to run a graph, counted from the first look.
ASKED = """() => {
  const { api } = app;
  if (api.asked === undefined) {
    const { queuePrompt } = api;
    api.asked = 0;
    api.queuePrompt = (...values) => { api.asked++; return queuePrompt.apply(api, values); };
  }
  return api.asked;
}"""


class ComfyPage(Page):
    """``server``: whose page it is."""

    def __init__(self, server: ComfyServer):
        super().__init__()
        self.address = f"http://127.0.0.1:{server.port}/"
        self.load()

    def load(self):
        """Open the page, or open it again."""
        self.open(self.address)
        self.wait(READY)

    def clear(self):
        """Begin with an empty graph, and nothing over it."""
        closed = "!document.querySelector('[aria-controls=results-list], [role=dialog]')"
        for _ in range(10):
            if self.becomes(closed, 1):
                break
            self.press("Escape", 27)
        if not self.becomes(closed, 1):
            self.load()
        self.evaluate("app.graph.clear()")

    def use(self, nodes2: bool):
        """Draw nodes by the Nodes 2.0 renderer, or on the canvas."""
        self.evaluate(f"app.extensionManager.setting.set('Comfy.VueNodes.Enabled', {json.dumps(nodes2)})")
        self.wait(f"!!LiteGraph.vueNodesMode === {json.dumps(nodes2)}")

    def template(self, name: str):
        """Open a template of this pack as a file; its card would fit it into the window too."""
        self.call(
            """(name) => fetch(`/api/workflow_templates/parallel-dit/${name}.json`)
              .then((found) => found.json()).then((graph) => app.loadGraphData(graph, true, true, name))""",
            name,
        )

    def open_card(self, name: str):
        """Open a template of this pack from its card in the template browser."""
        for _ in range(10):  # a click is lost while the page still lays something out
            self.click(".templates-tab-button")
            if self.becomes("!!document.querySelector('[role=dialog]')", 5):
                break
        self.click("[role=dialog] *", "parallel-dit")
        self.click(f"[role=dialog] [data-testid='template-workflow-{name}']")
        self.wait("app.graph.nodes.some((node) => node.type === 'MarkdownNote')")

    def set(self, node: str, widget: str, value):
        """Set a widget of the first node of a type."""
        self.call(
            """(type, name, value) => {
              const node = app.graph.nodes.find((each) => each.type === type);
              node.widgets.find((each) => each.name === name).value = value;
            }""",
            node,
            widget,
            value,
        )

    def bounds(self) -> list[dict]:
        """Return the nodes' bounds, once all of them are drawn."""
        self.wait(f"({BOUNDS})().every((found) => found && found.height)")
        return self.evaluate(f"({BOUNDS})()")

    def overlaps(self) -> list[tuple[str, str]]:
        """Return the pairs of nodes of which one covers a part of the other."""
        boxes = self.bounds()
        return [
            (a["title"], b["title"])
            for index, a in enumerate(boxes)
            for b in boxes[index + 1 :]
            if _meet(a["x"], a["width"], b["x"], b["width"])
            and _meet(a["y"], a["height"], b["y"], b["height"])
        ]

    def reports(self) -> dict[str, str]:
        """Return the report under each node of this pack, by the node's type."""
        return self.evaluate(f"({REPORTS})()")

    def show(self, node: str):
        """Put the first node of a type at the left top of the page, as large as it is."""
        self.call(
            """(type) => {
              const { pos } = app.graph.nodes.find((each) => each.type === type);
              app.canvas.ds.scale = 1;
              app.canvas.ds.offset = [100 - pos[0], 150 - pos[1]];
              app.canvas.draw(true, true);
            }""",
            node,
        )

    def note(self) -> dict:
        """Show the graph's note; return its text, ``cut`` (pixels) and ``contrast`` (WCAG 2)."""
        self.show("MarkdownNote")
        (found,) = self.wait(f"({NOTES})().length && ({NOTES})()", 30)
        return found

    def cut(self, node: str) -> int:
        """Show the first node of a type; return how many pixels of the report under it are cut off."""
        self.show(node)
        self.wait(f"({CUT})().some(([type]) => type === {json.dumps(node)})", 30)
        return dict(self.evaluate(f"({CUT})()"))[node]

    def report(self, node: str, text: str):
        """Have the first node of a type report ``text``, as ComfyUI does when it has run."""
        self.call(
            """(type, text) => {
              const { id } = app.graph.nodes.find((each) => each.type === type);
              const detail = { node: String(id), output: { parallel_dit: [text] }, prompt_id: "of-a-test" };
              app.api.dispatchEvent(new CustomEvent("executed", { detail }));
            }""",
            node,
            text,
        )
        self.wait_for_report(node, text)

    def wait_for_report(self, node: str, text: str):
        """Wait until the report under the node of a type is ``text``."""
        self.wait(f"({REPORTS})()[{json.dumps(node)}] === {json.dumps(text)}", 60)

    def press_run(self):
        """Press Run until the page asks for it: a click is lost while it still lays something out."""
        before = self.evaluate(f"({ASKED})()")
        for _ in range(10):
            self.click("button", "Run")
            if self.becomes(f"({ASKED})() > {before}", 5):
                return
        raise AssertionError("the page does not run anything")

    def run(self):
        """Press Run, and wait until that run has ended."""
        ended = "fetch('/history').then((r) => r.json()).then((h) => Object.keys(h).length)"
        before = self.evaluate(ended)
        self.press_run()
        self.wait(f"{ended}.then((count) => count > {before})", 600)  # ranks start in it, on a busy machine
        self.wait_for_queue()

    def wait_for_queue(self):
        """Wait until nothing runs."""
        self.wait(
            "fetch('/queue').then((r) => r.json())"
            ".then((q) => q.queue_running.length + q.queue_pending.length === 0)"
        )

    def tab(self, number: int):
        """Look at an open graph by its place among the tabs, -1 the last one."""
        self.call(
            """(number) => {
              const { workflow } = app.extensionManager;
              const wanted = workflow.openWorkflows.at(number);
              return app.loadGraphData(wanted.activeState, true, true, wanted);
            }""",
            number,
        )

    def put_down(self):
        """Click where a new node shall be that follows the mouse, until it does not."""
        for _ in range(20):
            self.click_at(900, 400)  # where nothing stands over the canvas
            if self.becomes("!app.graph.nodes.at(-1).flags.ghost", 1):
                return
        raise AssertionError("the new node still follows the mouse")

    def open_panel(self):
        """Open this pack's sidebar tab, unless it is open."""
        if not self.evaluate("!!document.querySelector('.pdit')"):
            self.click(".parallel-dit-tab-button")
            self.wait("!!document.querySelector('.pdit')")

    def has_text(self, text: str, seconds: float = 60):
        """Wait until the page shows a text."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})", seconds)

    def slot(self, node: str, name: str, is_input: bool) -> tuple[float, float]:
        """Return where on the page an input or output of the first node of a type is."""
        return tuple(
            self.call(
                """(type, name, isInput) => {
                  const node = app.graph.nodes.find((each) => each.type === type);
                  const slots = isInput ? node.inputs : node.outputs;
                  const place = node.getConnectionPos(isInput, slots.findIndex((slot) => slot.name === name));
                  const [x, y] = app.canvas.ds.convertOffsetToCanvas([...place]);
                  const { left, top } = app.canvas.canvas.getBoundingClientRect();
                  return [x + left, y + top];
                }""",
                node,
                name,
                is_input,
            )
        )


def _meet(a: float, size: float, b: float, other: float) -> bool:
    """Do two ranges have more than a rounded pixel in common?"""
    return a + 1 < b + other and b + 1 < a + size
