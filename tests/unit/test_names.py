"""A name has one meaning to who reads two files in turn."""

import ast
from collections import defaultdict

from source_files import SOURCES

#: Classes of two files that are two ends of one thing, in rooms that do not import each other.
TWO_ENDS = {"ArgumentCache"}
#: Files in which every line decides something: intermediate results have names there.
DENSE = (
    "backend.parallel.matrix_cuts",
    "nodes.graph.latent_sizes",
    "nodes.graph.queued_graph",
    "nodes.host.graph_requests",
)


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


def test_a_callback_that_does_nothing_is_nothing():
    """It has a name of its own, runtime.callbacks.nothing, and is no lambda wherever one is left out."""
    trees = ((module, ast.walk(ast.parse(path.read_text()))) for module, path in SOURCES.items())
    lambdas = (
        (module, node.body) for module, nodes in trees for node in nodes if isinstance(node, ast.Lambda)
    )
    assert not [module for module, body in lambdas if ast.unparse(body) == "None"]


def test_no_statement_of_a_dense_file_has_two_conditional_expressions():
    found = []
    for module in DENSE:
        nodes = list(ast.walk(ast.parse(SOURCES[module].read_text())))
        simple = (node for node in nodes if isinstance(node, ast.Assign | ast.Return | ast.Expr))
        found += [
            f"{module}:{node.lineno}"
            for node in simple
            if sum(isinstance(each, ast.IfExp) for each in ast.walk(node)) > 1
        ]
    assert not found
