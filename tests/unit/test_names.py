"""A name has one meaning to who reads two files in turn."""

import ast
from collections import defaultdict

from source_files import SOURCES

#: Classes of two files that are two ends of one thing, in rooms that do not import each other.
TWO_ENDS = {"ArgumentCache"}


def classes() -> list[tuple[str, ast.ClassDef]]:
    """Every class of the product with its module, but for those inside of functions and classes."""
    bodies = ((module, ast.parse(path.read_text()).body) for module, path in SOURCES.items())
    return [(module, node) for module, body in bodies for node in body if isinstance(node, ast.ClassDef)]


def test_a_class_outside_of_families_has_a_name_of_its_own():
    modules = defaultdict(set)
    for module, node in classes():
        if not module.startswith("backend.models."):
            modules[node.name].add(module)
    assert {name for name, found in modules.items() if len(found) > 1} == TWO_ENDS


def test_a_block_says_whose_it_is():
    """Warnings name a block by its class, and families derive theirs from each other's."""
    assert not [module for module, node in classes() if node.name == "Block"]
