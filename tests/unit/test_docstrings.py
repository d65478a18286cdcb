"""Public functions and methods of backend and nodes say what they do, verb first."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from source_files import ROOT, SOURCES, functions

#: What others name and document: torch, ComfyUI, and Layout.config_from_shapes.
CONTRACTS = {"forward", "define_schema", "execute", "config_from_shapes"}
#: First words that are no verb: articles, pronouns, prepositions, question words, and nouns of ours.
NO_VERBS = set(
    "A All An And As At Both By Each Every For From How If In It Its Like No Nothing Of On One Or Other Same "
    "Several So Some Such That The Their Then There These They This Those To Two What When Where Whether "
    "Which Who Whose Why With Without Argument Backend Byte Client Configuration Device Error Folder Key "
    "Latent Layer Length Matrix Memory Path Prompt Row Sequence Sigma Tensor Text Token Tuple Value".split()
)


def base_names(node: ast.ClassDef) -> set[str]:
    """Return the classes that a class names as its bases, without modules and type arguments."""
    names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    return names - {node.name}  # of diffusers' class that it stands for


CLASSES = [
    node
    for path in SOURCES.values()
    for node in ast.parse(path.read_text()).body
    if type(node) is ast.ClassDef
]
BASES: dict[str, set[str]] = defaultdict(set)
METHODS: dict[str, set[str]] = defaultdict(set)
for one in CLASSES:
    BASES[one.name] |= base_names(one)
    METHODS[one.name] |= {each.name for each in one.body if isinstance(each, ast.FunctionDef)}


def inherits(owner: str, method: str) -> bool:
    """Return whether a base of ``owner`` in this project has the method, and so its docstring."""
    return any(method in METHODS[base] or inherits(base, method) for base in BASES[owner])


def documented() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield FILE:NAME and the function of all that have to have a docstring."""
    for path in SOURCES.values():
        for name, function in functions(ast.parse(path.read_text())).items():
            owner, _, short = name.rpartition(".")
            decorators = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
            is_value = decorators & {"property", "cached_property", "setter"}
            is_private = short.startswith("_") or owner.startswith("_")
            if not (is_private or is_value or short in CONTRACTS or inherits(owner, short)):
                yield f"{path.relative_to(ROOT)}:{name}", function


def is_verb(word: str) -> bool:
    """Return whether a docstring's first word may be an imperative: no plural, third person or field."""
    is_plural = word.endswith("s") and not word.endswith("ss")
    return word.isalpha() and word[0].isupper() and not is_plural and word not in NO_VERBS


def test_public_functions_have_docstrings():
    assert not [name for name, function in documented() if not ast.get_docstring(function)]


def test_docstrings_begin_with_a_verb():
    """As "Return the shard." and not "The shard." or "Returns the shard."."""
    firsts = {name: (ast.get_docstring(each) or "None").split()[0] for name, each in documented()}
    assert not {name: word for name, word in firsts.items() if not is_verb(word.rstrip(",;:"))}
