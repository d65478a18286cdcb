"""The tables of the fast tier name tests that are there."""

import ast
import gc

import pytest
import tiers

NAMES = [*tiers.LEFT_OUT, *tiers.SOME, *tiers.OF_SIGNATURES]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_left_out_is_there(name):
    """A renamed test would come back into the fast tier unseen."""
    file, _, test = name.partition("::")
    tree = ast.parse((tiers.TESTS / file).read_text())
    assert not test or test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


class Item:
    """What choose() and is_named() read of a test."""

    def __init__(self, path: str, name: str, parameter: str = "", args=()):
        self.path, self.originalname = tiers.TESTS / path, name
        self.nodeid = f"tests/{path}::{name}" + (f"[{parameter}]" if parameter else "")
        self.callspec = type("Call", (), {"params": {"family": parameter}})
        self.config = type("Config", (), {"args": list(args)})
        self.marks = []

    def add_marker(self, mark):
        self.marks.append(mark)


def test_a_family_of_a_known_signature_is_left_out():
    where = ("unit/test_families.py", "test_patches_against_full_buffers_equal_the_whole")
    sd3, hunyuan = Item(*where, "sd3"), Item(*where, "hunyuan-image21")
    tiers.choose([sd3, hunyuan])
    assert not sd3.marks and hunyuan.marks


def test_files_and_parameters_are_left_out():
    life = Item("socket/test_backend_life.py", "test_degrees_change_on_the_same_ranks")
    names = [Item("unit/test_lora_names.py", "test_both_names_of_every_matrix", str(i)) for i in range(12)]
    tiers.choose([life, *names])
    assert life.marks and sum(not item.marks for item in names) == 3


@pytest.mark.parametrize(
    "argument, named",
    [
        ("tests/unit/test_lora.py::test_a[x]", True),
        ("tests/unit/test_lora.py::test_a", True),
        ("tests/unit/test_lora.py::test_ab", False),
        ("tests/unit/test_lora.py", False),
        ("tests", False),
    ],
)
def test_a_test_that_is_asked_for_by_name_runs(argument, named):
    assert tiers.is_named(Item("unit/test_lora.py", "test_a", "x", [argument])) == named


def test_garbage_is_collected_and_what_is_imported_is_not_looked_through():
    """Python's own thresholds cost tests that build models 7 to 9 % of their processor time."""
    most_new, *_ = gc.get_threshold()
    assert gc.isenabled() and most_new >= 10_000 and gc.get_freeze_count() > 100_000
