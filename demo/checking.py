"""Does an image show what its prompt asks for? No model involved, the same result every time."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from . import scenes
from .scenes import BACKGROUNDS, COLOURS, PLACES, SHAPES, SIZE, Item

# Shares are parts of the whole image; the smallest object drawn covers 5 %, the largest 13 %.
MIN_OBJECT = 0.04
MAX_OBJECT = 0.16
MAX_STRAY_COLOUR = 0.02
MIN_BACKGROUND = 0.6
COLOUR_RADIUS = 0.3  # RGB distance (0..1 per channel) within which a pixel has a colour
PLACE_RADIUS = 0.2  # offset of an object's centre in the frame [-1, 1], each way

_PALETTE = {**COLOURS, **BACKGROUNDS}
_NAMES = list(_PALETTE)
# Area in units of radius^2, and how far below the shape's own centre its centroid lies, in radii.
_AREA = {"circle": 3.1416, "square": 3.0976, "triangle": 1.944}
_SAG = {"circle": 0.0, "square": 0.0, "triangle": 0.2}


@dataclass(frozen=True)
class Check:
    """What is wrong with an image, in words; true when nothing is."""

    misplaced: tuple[str, ...]  # wrong colours, places or background
    misshapen: tuple[str, ...]  # right colour and place, wrong shape

    @property
    def problems(self) -> tuple[str, ...]:
        return self.misplaced + self.misshapen

    def __bool__(self) -> bool:
        return not self.problems


def check_image(prompt: str, image: torch.Tensor) -> Check:
    """Check an image (H, W, 3) in [0, 1] against a prompt of the grammar in scenes.py.

    Every object must be there in its colour, place and shape, on the right background, and
    nothing else may be. ValueError if the prompt is not of the grammar.
    """
    scene = scenes.parse_prompt(prompt)
    named = _colour_map(image)
    stray = _any_colour(named)
    misplaced, misshapen = [], []
    for item in scene.items:
        found = (named == _NAMES.index(item.colour)) & _half(item.place)
        stray &= ~found
        if problem := _place_problem(item, found):
            misplaced.append(problem)
        elif (shape := _likest_shape(found)) != item.shape:
            misshapen.append(f"{_label(item)}: looks like a {shape}")
    if _share(stray) > MAX_STRAY_COLOUR:
        misplaced.append("colour where the prompt has none")
    if _share(named == _NAMES.index(scene.background)) < MIN_BACKGROUND:
        misplaced.append(f"background not {scene.background}")
    return Check(tuple(misplaced), tuple(misshapen))


def _label(item: Item) -> str:
    return f"{item.colour} {item.shape} on the {item.place}"


def _place_problem(item: Item, found: torch.Tensor) -> str | None:
    """`found` (64, 64) marks the pixels of the item's colour in the item's half."""
    if not MIN_OBJECT <= _share(found) <= MAX_OBJECT:
        return f"{_label(item)}: covers {_share(found):.1%}"
    x, y = _centroid(found)
    place_x, place_y = PLACES[item.place]
    if max(abs(x - place_x), abs(y - place_y)) > PLACE_RADIUS:
        return f"{_label(item)}: centred at x {x:.2f}, y {y:.2f}"
    return None


def _likest_shape(found: torch.Tensor) -> str:
    """The shape that a mask (64, 64) overlaps most."""
    return max(SHAPES, key=lambda shape: _overlap(found, shape))


def _colour_map(image: torch.Tensor) -> torch.Tensor:
    """(H, W, 3) -> (64, 64) index into the palette of each pixel's colour; -1 for none of them."""
    small = F.interpolate(image.detach().float().cpu().movedim(-1, 0)[None], (SIZE, SIZE), mode="area")
    palette = torch.tensor(list(_PALETTE.values()))
    distance, nearest = torch.cdist(small[0].flatten(1).T, palette).min(dim=1)
    return nearest.masked_fill(distance > COLOUR_RADIUS, -1).view(SIZE, SIZE)


def _any_colour(named: torch.Tensor) -> torch.Tensor:
    """Marks the pixels that have an object's colour; the palette lists those first."""
    return (named >= 0) & (named < len(COLOURS))


def _half(place: str) -> torch.Tensor:
    """(64, 64) mask of the half of the image a place names."""
    x, y = PLACES[place]
    column, row = _axis()[None, :], _axis()[:, None]
    return x * column + y * row > 0


def _axis() -> torch.Tensor:
    """(64,) pixel centres in the frame [-1, 1]."""
    return (torch.arange(SIZE) + 0.5) * (2 / SIZE) - 1


def _share(mask: torch.Tensor) -> float:
    return mask.float().mean().item()


def _centroid(mask: torch.Tensor) -> tuple[float, float]:
    """(x, y) of a mask's centre in the frame [-1, 1]."""
    weight = mask.float() / mask.sum()
    return (weight.sum(0) @ _axis()).item(), (weight.sum(1) @ _axis()).item()


def _overlap(found: torch.Tensor, shape: str) -> float:
    """Intersection over union of a mask with a shape of the same area and centre."""
    x, y = _centroid(found)
    radius = (_share(found) * 4 / _AREA[shape]) ** 0.5  # the frame's area is 4
    ideal = scenes.coverage(shape, x, y - _SAG[shape] * radius, radius, SIZE) > 0.5
    return ((found & ideal).sum() / (found | ideal).sum()).item()
