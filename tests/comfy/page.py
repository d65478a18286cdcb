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
#: Text of this pack's reports, by the type of the node.
REPORTS = """() => Object.fromEntries(app.graph.nodes.flatMap(({ type, widgets }) =>
  (widgets ?? []).filter(({ isReport }) => isReport).map(({ value }) => [type, value])))"""


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
        """Open a template of this pack as its card does."""
        self.call(
            """(name) => fetch(`/api/workflow_templates/parallel-dit/${name}.json`)
              .then((found) => found.json()).then((graph) => app.loadGraphData(graph, true, true, name))""",
            name,
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

    def run(self):
        """Press Run, and wait until that run has ended."""
        ended = "fetch('/history').then((r) => r.json()).then((h) => Object.keys(h).length)"
        before = self.evaluate(ended)
        self.click("button", "Run")
        self.wait(f"{ended}.then((count) => count > {before})")
        self.wait_for_queue()

    def wait_for_queue(self):
        """Wait until nothing runs."""
        self.wait(
            "fetch('/queue').then((r) => r.json())"
            ".then((q) => q.queue_running.length + q.queue_pending.length === 0)"
        )

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
