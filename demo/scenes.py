"""The world the demo model knows: coloured shapes, their places, and the prompts that name them."""

import random
import re
from dataclasses import dataclass

import torch

SIZE = 64  # pixels per side of a training image

COLOURS = {  # RGB in [0, 1]
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 0.8, 0.0),
    "blue": (0.0, 0.0, 1.0),
    "yellow": (1.0, 1.0, 0.0),
    "purple": (0.6, 0.0, 0.8),
    "orange": (1.0, 0.5, 0.0),
    "white": (1.0, 1.0, 1.0),
    "cyan": (0.0, 1.0, 1.0),
}
BACKGROUNDS = {"black": (0.0, 0.0, 0.0), "gray": (0.45, 0.45, 0.45)}
SHAPES = ("circle", "square", "triangle")
# Centres (x, y) in a frame that spans [-1, 1] both ways, y pointing down.
PLACES = {"left": (-0.5, 0.0), "right": (0.5, 0.0), "top": (0.0, -0.5), "bottom": (0.0, 0.5)}
# relation -> (place of the first object, place of the second object)
RELATIONS = {
    "left of": ("left", "right"),
    "right of": ("right", "left"),
    "above": ("top", "bottom"),
    "below": ("bottom", "top"),
}

TWO_OBJECT_SHARE = 0.6
UNSAID_BLACK_SHARE = 0.3  # how often a black background is left out of the prompt
ARTICLES = ("a", "an", "the")


@dataclass(frozen=True)
class Item:
    """One object: its colour, shape and place, each a word of the vocabulary."""

    colour: str
    shape: str
    place: str


@dataclass(frozen=True)
class Scene:
    """One or two objects on a background; with two, their places face each other."""

    items: tuple[Item, ...]
    background: str


def words_of(text: str) -> list[str]:
    """The words of a prompt in lower case, without punctuation and articles."""
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ARTICLES]


def random_scene(rng: random.Random) -> Scene:
    """Draw a scene; 60 % have two objects."""
    if rng.random() < TWO_OBJECT_SHARE:
        places = rng.choice(list(RELATIONS.values()))
    else:
        places = (rng.choice(list(PLACES)),)
    items = tuple(Item(rng.choice(list(COLOURS)), rng.choice(SHAPES), place) for place in places)
    return Scene(items, rng.choice(list(BACKGROUNDS)))


def describe(scene: Scene, name_background: bool = True) -> str:
    """Write the prompt of a scene; only a black background may go unnamed."""
    named = [_noun_phrase(item) for item in scene.items]
    places = tuple(item.place for item in scene.items)
    if len(named) == 2:
        relation = next(words for words, pair in RELATIONS.items() if pair == places)
        text = f"{named[0]} {relation} {named[1]}"
    else:
        text = f"{named[0]} on the {places[0]}"
    if name_background or scene.background != "black":
        text += f" on {scene.background}"
    return text


def _noun_phrase(item: Item) -> str:
    article = "an" if item.colour[0] in "aeiou" else "a"
    return f"{article} {item.colour} {item.shape}"


def _one_of(words) -> str:
    return "(" + "|".join(words) + ")"


_OBJECT = f"{_one_of(COLOURS)} {_one_of(SHAPES)}"
_BACKGROUND = f"(?: on {_one_of(BACKGROUNDS)})?"
_ONE_OBJECT = re.compile(f"{_OBJECT} on {_one_of(PLACES)}{_BACKGROUND}")
_TWO_OBJECTS = re.compile(f"{_OBJECT} {_one_of(RELATIONS)} {_OBJECT}{_BACKGROUND}")


def parse_prompt(text: str) -> Scene:
    """Read a prompt of the grammar back into a scene; ValueError on any other text."""
    phrase = " ".join(words_of(text))
    if match := _TWO_OBJECTS.fullmatch(phrase):
        colour, shape, relation, colour_2, shape_2, background = match.groups()
        place, place_2 = RELATIONS[relation]
        items = (Item(colour, shape, place), Item(colour_2, shape_2, place_2))
    elif match := _ONE_OBJECT.fullmatch(phrase):
        *item, background = match.groups()
        items = (Item(*item),)
    else:
        raise ValueError(f"not a prompt about coloured shapes: {text!r}")
    return Scene(items, background or "black")


def draw(scene: Scene, rng: random.Random | None = None, size: int = SIZE) -> torch.Tensor:
    """Paint a scene: (3, size, size) RGB in [-1, 1]; `rng` jitters places and sizes a little."""
    image = _rgb(BACKGROUNDS[scene.background]).expand(3, size, size)
    for item in scene.items:
        jitter = [rng.uniform(-1, 1) if rng else 0.0 for _ in range(3)]
        x, y = PLACES[item.place]
        cover = coverage(
            item.shape, x + 0.06 * jitter[0], y + 0.06 * jitter[1], 0.36 + 0.04 * jitter[2], size
        )
        image = image * (1 - cover) + _rgb(COLOURS[item.colour]) * cover
    return image * 2 - 1


def _rgb(colour: tuple[float, float, float]) -> torch.Tensor:
    """A colour as a (3, 1, 1) tensor."""
    return torch.tensor(colour).view(3, 1, 1)


def coverage(shape: str, cx: float, cy: float, radius: float, size: int) -> torch.Tensor:
    """How much of each pixel a shape covers: (size, size) in [0, 1], smooth at the edge."""
    axis = (torch.arange(size) + 0.5) * (2 / size) - 1
    x, y = axis[None, :] - cx, axis[:, None] - cy
    if shape == "circle":
        inside = radius - (x * x + y * y).sqrt()
    elif shape == "square":
        inside = radius * 0.88 - torch.maximum(x.abs(), y.abs())
    else:
        # 0.857 = 1 / sqrt(1 + 0.6^2) makes the slanted side's value a distance too.
        inside = torch.minimum(radius * 0.8 - y, ((y + radius) * 0.6 - x.abs()) * 0.857)
    return (inside * (size / 2) + 0.5).clamp(0, 1)  # frame units -> pixels


def random_example(rng: random.Random, size: int = SIZE) -> tuple[torch.Tensor, str, Scene]:
    """One training example: (image (3, size, size) in [-1, 1], prompt, scene)."""
    scene = random_scene(rng)
    return draw(scene, rng, size), _random_prompt(scene, rng), scene


def _random_prompt(scene: Scene, rng: random.Random) -> str:
    return describe(scene, name_background=rng.random() >= UNSAID_BLACK_SHARE)


def random_prompts(n: int, seed: int) -> list[str]:
    """`n` prompts, drawn as the training prompts are."""
    rng = random.Random(seed)
    return [_random_prompt(random_scene(rng), rng) for _ in range(n)]
