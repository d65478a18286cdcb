"""Takes README.md's screenshots in ComfyUI's page, with Chromium: the demo after a run, and the side panel.

python tests/comfy/screenshots.py     # COMFYUI_PATH, COMFYUI_PYTHON, CHROMIUM as for the tests
"""

import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from comfy_server import ComfyServer
from page import ComfyPage

DOCS = ROOT / "docs"
STEP = "fetch('/parallel_dit/status').then((r) => r.json()).then((s) => /^step [4-9]/.test(s.doing))"


def resize(page: ComfyPage, width: int, height: int):
    """Give the page's window a size."""
    page.command(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
    )
    time.sleep(1)


def demo(page: ComfyPage):
    """The demo as it opens from its card, after a run."""
    resize(page, 1600, 900)
    page.evaluate("app.extensionManager.setting.set('Comfy.Minimap.Visible', false)")
    page.use(nodes2=True)
    page.open_card("demo")
    time.sleep(2)
    page.run()
    time.sleep(2)
    page.screenshot(DOCS / "demo_workflow.png")


def panel(page: ComfyPage):
    """The side panel during a run, next to the sampler."""
    resize(page, 1020, 700)
    page.open_panel()
    page.set("ParallelSampler", "steps", 60)
    page.call(
        """() => {
          const { pos } = app.graph.nodes.find((node) => node.type === "ParallelSampler");
          app.canvas.ds.scale = 0.75;
          app.canvas.ds.offset = [960 - pos[0], 150 - pos[1]];
          app.canvas.draw(true, true);
        }"""
    )
    page.press_run()
    page.wait(STEP)
    time.sleep(2)
    page.screenshot(DOCS / "images/panel.jpg")
    page.wait_for_queue()


def main():
    with tempfile.TemporaryDirectory() as folder:
        server = ComfyServer(Path(folder), {"parallel-dit": ROOT})
        try:
            page = ComfyPage(server)
            try:
                demo(page)
                panel(page)
            finally:
                page.close()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
