"""Files as they are released: what each header is recognised as, or why it is refused."""

import json
from pathlib import Path

import pytest
from headers import opened, released

from backend.errors import UnsupportedError
from backend.loading.known_models import FORMATS, KNOWN, check_known
from backend.models.key_layout import PREFIXES

#: File -> [family, parameters filled, tensors that nothing reads], or its refusal.
TABLE = json.loads((Path(__file__).parents[1] / "headers" / "released.json").read_text())


def found(name: str) -> list | str:
    """What the table must say of a file."""
    try:
        checkpoint = opened(name)
    except UnsupportedError as error:
        return str(error)
    read = {checkpoint.keys.get(source.key, source.key) for source in checkpoint.sources.values()}
    unread = [ours for ours, key in checkpoint.keys.items() if key not in read]
    return [checkpoint.family.name, len(checkpoint.sources), unread]


@pytest.mark.parametrize("name", TABLE)
def test_a_released_file(name):
    assert found(name) == TABLE[name]


def test_every_header_is_in_the_table():
    assert TABLE.keys() == released().keys()


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: f"{known.name} {known.keys[-1]}")
def test_a_known_model_is_refused_by_its_name(known):
    for prefix in PREFIXES:
        shapes = {f"{prefix}{key}": (1,) for key in known.keys}
        for key, (axis, size) in known.sizes.items():
            shapes[prefix + key] = (*(1,) * axis, size)
        with pytest.raises(UnsupportedError, match="which is not supported") as error:
            check_known("model", shapes)
        assert str(error.value).startswith("model is ")


@pytest.mark.parametrize("end", FORMATS)
def test_a_known_format_is_refused(end):
    with pytest.raises(UnsupportedError, match=FORMATS[end][0][:20]):
        check_known("model", {"blocks.0.attn.img_in.weight": (4, 4), f"blocks.0.attn.{end}": (4,)})
