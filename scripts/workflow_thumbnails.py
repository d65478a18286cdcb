"""Draws workflows/NAME.jpg, the pictures of the template browser: the graph of a workflow; of the demo what
its model paints, with the timeline of its ranks (method_pictures.py)."""

from argparse import Namespace

from PIL import Image, ImageDraw, ImageFont
from workflow_layout import TITLE

SIZE = (768, 512)
#: Pixels of the picture, of twice that size until it is done: edge, and the strip with the title.
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
#: What the demo paints: its workflow's own values.
DEMO = Namespace(prompt="a red circle left of a blue square on black", steps=20, cfg=2.5, seed=10, repeat=1)


def canvas(title: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """An empty picture of twice the size, with a title."""
    image = Image.new("RGB", (2 * SIZE[0], 2 * SIZE[1]), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.text((EDGE, EDGE), title, fill=INK, font=ImageFont.load_default(68))
    return image, draw


def done(image: Image.Image) -> Image.Image:
    return image.resize(SIZE, Image.Resampling.LANCZOS)


class View:
    """Where the graph's points are in the picture."""

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
    image, draw = canvas(page["nodes"][0]["title"])
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
    return done(image)


def painted() -> Image.Image:
    """What the demo's model paints on two ranks; they end with it."""
    from run_demo import ParallelConfig, device, paint, pool, shapes

    try:
        samples, _ = paint(ParallelConfig(cfg_degree=2, device=device()), DEMO)
    finally:
        pool.close_all()
    pixels = shapes.decode(shapes.to_vae_units(samples))[0]
    return Image.fromarray((pixels * 255).round().byte().numpy())


def demo_thumbnail(title: str) -> Image.Image:
    """The demo's picture and its prompt, above the timeline of its two ranks."""
    from method_pictures import LEFT, PICTURES, WHOLE_COLOUR, timeline

    image, draw = canvas(title)
    side = 560
    picture = painted().resize((side, side), Image.Resampling.LANCZOS)
    image.paste(picture, (EDGE, STRIP))
    draw.rectangle((EDGE, STRIP, EDGE + side, STRIP + side), outline=ROW, width=2)
    large, small = ImageFont.load_default(54), ImageFont.load_default(40)
    head, tail = DEMO.prompt.split(" left of ")
    lines = [f'"{head}', "left of", *(f'{tail}"'.replace(" on ", "\non ")).split("\n")]
    for row, line in enumerate(lines):
        draw.text((2 * EDGE + side, STRIP + 30 + 80 * row), line, fill=INK, font=large)
    left = EDGE + 2 * LEFT
    rows = timeline(PICTURES["cfg2"])
    step = (2 * SIZE[0] - EDGE - left) / max(works[-1].end for works in rows)
    draw.text((2 * EDGE + side, STRIP + side - 80), "two ranks, one prompt each", fill=INK, font=small)
    for rank, works in enumerate(rows):
        top = STRIP + side + 60 + 100 * rank
        draw.text((EDGE, top + 14), f"GPU {rank}", fill=INK, font=small)
        for work in works:
            box = (left + work.start * step, top, left + work.end * step, top + 76)
            draw.rectangle(box, fill=WHOLE_COLOUR, outline=BACKGROUND, width=3)
            sign = "+" if work.branch == "positive" else "-"
            draw.text((box[0] + 40, top + 14), f"{work.step + 1}{sign}", fill="#16202c", font=small)
    return done(image)
