"""Draws workflows/NAME.jpg, the images of the template browser: the graph of a workflow."""

from PIL import Image, ImageDraw, ImageFont
from workflow_layout import TITLE

SIZE = (768, 512)
#: Pixels of the image, of twice that size until it is done: edge, and the strip with the title.
EDGE, STRIP = 32, 120
BACKGROUND, NODE, NOTE, INK, ROW = "#202020", "#3a3a3a", "#65552c", "#e8e8e8", "#555555"
COLOURS = {
    "CLIP": "#ffd500",
    "VAE": "#ff6e6e",
    "CONDITIONING": "#ffa931",
    "LATENT": "#ff9cf9",
    "IMAGE": "#64b5f6",
    "PARALLEL_DIT": "#9fd49f",
    "PARALLEL_CONFIG": "#9fb0d4",
}


class View:
    """Where the graph's points are in the image."""

    def __init__(self, page: dict):
        boxes = [group["bounding"] for group in page["groups"]]
        boxes += [[*node["pos"], *node["size"]] for node in page["nodes"]]
        self.left, self.top = (min(box[axis] for box in boxes) for axis in (0, 1))
        self.top = min(self.top, *(node["pos"][1] - TITLE for node in page["nodes"]))
        width, height = (max(box[axis] + box[axis + 2] for box in boxes) for axis in (0, 1))
        inner = (2 * SIZE[0] - 2 * EDGE, 2 * SIZE[1] - STRIP - EDGE)
        self.scale = min(inner[0] / (width - self.left), inner[1] / (height - self.top))

    def at(self, x: float, y: float) -> tuple[float, float]:
        return EDGE + (x - self.left) * self.scale, STRIP + (y - self.top) * self.scale

    def box(self, x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
        return *self.at(x, y), *self.at(x + width, y + height)


def draw_link(draw: ImageDraw.ImageDraw, view: View, start, end, colour: str):
    """A curve from an output to an input, as the page draws it."""
    (x0, y0), (x1, y1) = view.at(*start), view.at(*end)
    bend = max(abs(x1 - x0) / 2, 40 * view.scale)
    curve = []
    for t in (index / 24 for index in range(25)):
        ends = (1 - t) ** 3 * x0 + t**3 * x1
        x = ends + 3 * (1 - t) * t * ((1 - t) * (x0 + bend) + t * (x1 - bend))
        curve.append((x, y0 + (3 * t * t - 2 * t**3) * (y1 - y0)))
    draw.line(curve, fill=colour, width=max(round(4 * view.scale), 3))


def draw_node(draw: ImageDraw.ImageDraw, view: View, node: dict):
    """A box with a bar for its title and one for each row; texts could not be read at this size."""
    (x, y), (width, height) = node["pos"], node["size"]
    is_note = node["type"] == "MarkdownNote"
    fill = NOTE if is_note else NODE
    box = view.box(x, y - TITLE, width, height + TITLE)
    draw.rounded_rectangle(box, 8 * view.scale, fill=fill, outline="#111111")
    draw.rectangle(view.box(x + 12, y - TITLE + 10, width * 0.5, 12), fill="#bbbbbb")
    rows = 8 if is_note else len(node["widgets_values"])
    first = y + 14 + 20 * max(len(node["inputs"]), len(node["outputs"]))
    for row in range(rows):
        top = first + 24 * row
        if top + 12 < y + height:
            wide = width - 24 if not is_note or row % 4 else width * 0.6
            draw.rectangle(view.box(x + 12, top, wide, 10), fill="#8a7a4c" if is_note else ROW)


def graph_thumbnail(page: dict) -> Image.Image:
    """The groups, nodes and links of a page, with the title of its note."""
    image = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.text((EDGE, EDGE), page["nodes"][0]["title"], fill=INK, font=ImageFont.load_default(68))
    view = View(page)
    for group in page["groups"]:
        colour = Image.blend(
            Image.new("RGB", (1, 1), BACKGROUND), Image.new("RGB", (1, 1), group["color"]), 0.35
        ).getpixel((0, 0))
        draw.rectangle(view.box(*group["bounding"]), fill=colour, outline=group["color"], width=2)
    by_id = {node["id"]: node for node in page["nodes"]}
    for _, source, source_slot, target, slot, type_ in page["links"]:
        a, b = by_id[source], by_id[target]
        start = (a["pos"][0] + a["size"][0], a["pos"][1] + 14 + 20 * source_slot)
        end = (b["pos"][0], b["pos"][1] + 14 + 20 * slot)
        draw_link(draw, view, start, end, COLOURS.get(type_, "#aaaaaa"))
    for node in page["nodes"]:
        draw_node(draw, view, node)
    return image.resize(SIZE, Image.Resampling.LANCZOS)
