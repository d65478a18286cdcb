"""Places the nodes of a workflow's page, so that ComfyUI opens it with texts that can be read.

ComfyUI fits a template into its window: ``zoom`` is useLitegraphService().fitView of ComfyUI_frontend. Below
``READABLE`` its classic canvas draws no texts. Heights are those that ComfyUI 0.33 draws in the renderer that
takes more, measured on every type of node.
"""

from dataclasses import dataclass, field
from itertools import combinations, product
from textwrap import wrap

#: Zoom below which the classic canvas leaves out texts: 8 of 14 pixels (MinFontSizeForLOD, NODE_TEXT_SIZE) on
#: a screen of one pixel a point; a finer screen has a lower one.
READABLE = 8 / 14
#: Part of the window that the graph fills, and what is added around it.
FILLED, MARGIN = 0.75, 10
#: What a browser leaves of the smaller usual screen, 1366 x 768, for which layouts are chosen.
WINDOW = (1366, 640)
WIDTH, TITLE = 300, 30
#: Between nodes of a column (with the lower one's title), between columns of a group, between groups.
BELOW, WITHIN, BETWEEN = 50, 30, 60
#: A group's edge around its nodes, and its title above them.
EDGE, HEADING = 20, 40
#: Heights of a slot and of a widget; of a widget on the classic canvas, the advanced ones too; of the
#: button for those; of the pack's name; of a box of text; of an image; and what a node has besides.
SLOT, WIDGET, CLASSIC, BUTTON, BADGE, TEXT, IMAGE, FRAME = 20, 28, 24, 32, 24, 90, 260, 24
#: Height to which a node grows when it runs: its report (MAX_HEIGHT of web/report.js for the
#: first), its image.
GROWTH = {
    "LoadParallelDiT": 240,
    "ParallelSampler": 120 + IMAGE,
    "SamplerCustom": IMAGE,
    "Save": IMAGE,
}
#: Letters that surely fit into a pixel of a note's width, and heights of a line and of a note's frame.
LETTERS, LINE, PAPER = 0.16, 16, 50


@dataclass(frozen=True)
class Group:
    """A box around nodes: those that make one of the types, unless another group names them by the
    beginning of their own."""

    title: str
    colour: str
    makes: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


#: From left to right.
GROUPS = (
    Group("Encoders, VAE, images", "#3f789e", ("CLIP", "VAE", "IMAGE", "CLIP_VISION"), ("CheckpointLoader",)),
    Group("GPUs and model", "#8a8", ("PARALLEL_CONFIG", "PARALLEL_DIT", "MODEL")),
    Group("Prompt and latent", "#b58b2a"),
    Group("Sample on all GPUs", "#a1309b", (), ("ParallelSampler", "SamplerCustom", "LTXVSeparate")),
    Group("Result", "#999", (), ("VAEDecode", "Save", "CreateVideo", "LTXVAudioVAEDecode", "PreviewImage")),
)
OTHERS = GROUPS[2]


def group_of(node: dict) -> Group:
    """Return the group of a node: that which names it, else that of what it makes."""
    made = [output["type"] for output in node["outputs"][:1]]
    named = (group for group in GROUPS if node["type"].startswith(group.named))
    makes = (group for group in GROUPS if set(made) & set(group.makes))
    return next(named, None) or next(makes, OTHERS)


def growth_of(kind: str) -> int:
    """How much higher a node may get when it runs."""
    return sum(height for name, height in GROWTH.items() if kind.startswith(name))


def height_of(kind: str, slots: int, widgets: list[tuple[str, dict]], shown: int, is_ours: bool) -> int:
    """A node's height before it runs, without its title, with so many rows of slots and of ``shown`` widgets.
    Advanced ones are folded away; on the classic canvas, whose rows are lower, there is room for all."""
    advanced = sum(bool(options.get("advanced")) for _, options in widgets)
    modern = WIDGET * (shown - advanced) + BUTTON * bool(advanced) + BADGE * is_ours
    texts = sum(bool(options.get("multiline")) for _, options in widgets)
    image = IMAGE * kind.startswith("LoadImage")
    return FRAME + SLOT * slots + max(modern, CLASSIC * shown) + TEXT * texts + image


def note_height(text: str, width: int) -> int:
    """Return a note's height at a width: its lines, and the gaps between paragraphs and before a list."""
    lines = sum(len(wrap(line, int(LETTERS * width))) for line in text.split("\n"))
    paragraphs = text.count("\n\n") + ("\n- " in text)
    return PAPER + LINE * (lines + paragraphs)


@dataclass
class Column:
    """Nodes below each other; ``place``: left and top of the first."""

    nodes: list[dict]
    place: tuple[int, int] = (0, 0)

    @property
    def height(self) -> int:
        """What its nodes take, with room for what grows above others."""
        sizes = [node["size"][1] for node in self.nodes]
        growths = [growth_of(node["type"]) for node in self.nodes[:-1]]
        return sum(sizes) + sum(growths) + BELOW * len(growths)


def zoom(size: tuple[float, float], window: tuple[int, int]) -> float:
    """Zoom at which ComfyUI opens nodes of a size in a window."""
    return min(FILLED * inner / (outer + 2 * MARGIN) for outer, inner in zip(size, window, strict=True))


def splits(nodes: list[dict]) -> list[list[Column]]:
    """The lowest way to put nodes, in their order, into one column, into two, and into three."""
    lowest = []
    for count in range(1, min(3, len(nodes)) + 1):
        ways = [
            [Column(nodes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(nodes)), strict=True)]
            for cuts in combinations(range(1, len(nodes)), count - 1)
        ]
        lowest.append(min(ways, key=lambda columns: max(column.height for column in columns)))
    return lowest


@dataclass
class Layout:
    """``parts``: the groups that have nodes, and their columns; ``under``: which of them the note is above,
    (first, how many); with none it has a column of its own, at the left."""

    parts: list[tuple[Group, list[Column]]]
    under: tuple[int, int]
    note: str
    size: tuple[int, int] = field(init=False)

    def __post_init__(self):
        first, count = self.under
        left, lefts = (0 if count else WIDTH + BETWEEN), []
        for _, columns in self.parts:
            lefts.append(left)
            left += len(columns) * (WIDTH + WITHIN) - WITHIN + BETWEEN
        ends = [*lefts[1:], left]
        start = lefts[first] if count else 0
        width = ends[first + count - 1] - BETWEEN - start if count else WIDTH
        height = note_height(self.note, width)
        self.box = (start, 0, width, height)
        bottom = height
        for number, (_, columns) in enumerate(self.parts):
            top = height + BELOW + EDGE + HEADING if first <= number < first + count else 0
            for index, column in enumerate(columns):
                column.place = (lefts[number] + index * (WIDTH + WITHIN), top)
                bottom = max(bottom, top + column.height)
        self.size = (left - BETWEEN, bottom + TITLE)

    def place(self):
        """Write where each node stands into it."""
        for _, columns in self.parts:
            for column in columns:
                left, top = column.place
                for node in column.nodes:
                    node["pos"] = [left, top]
                    top += node["size"][1] + growth_of(node["type"]) + BELOW

    def boxes(self) -> list[dict]:
        """The groups as the page has them, with room for what grows."""
        return [
            {
                "id": number,
                "title": group.title,
                "bounding": self.bounding(columns),
                "color": group.colour,
                "font_size": 24,
                "flags": {},
            }
            for number, (group, columns) in enumerate(self.parts, 1)
        ]

    @staticmethod
    def bounding(columns: list[Column]) -> list[int]:
        """Left, top, width and height of a group around its columns."""
        left, top = columns[0].place
        last = max(column.height + growth_of(column.nodes[-1]["type"]) for column in columns)
        width = columns[-1].place[0] + WIDTH - left
        above = TITLE + HEADING
        return [left - EDGE, top - above, width + 2 * EDGE, above + last + EDGE]


def best_layout(nodes: list[dict], note: str) -> Layout:
    """Return the layout that opens at the largest zoom; of those within a hundredth the one whose groups have
    the fewest columns, and whose note is at the left."""
    grouped = [(group, [node for node in nodes if group_of(node) is group]) for group in GROUPS]
    present = [(group, members) for group, members in grouped if members]
    count = len(present)
    unders = [(0, 1), (0, 0), (0, 2), (count - 2, 2), (count - 1, 1)]
    choices = [[(group, columns) for columns in splits(members)] for group, members in present]
    ways = [(parts, under) for under in unders for parts in product(*choices)]

    def rank(way) -> tuple[float, int]:
        parts, under = way
        layout = Layout(list(parts), under, note)
        return -round(zoom(layout.size, WINDOW), 2), sum(len(columns) for _, columns in parts)

    parts, under = min(ways, key=rank)
    return Layout(list(parts), under, note)
