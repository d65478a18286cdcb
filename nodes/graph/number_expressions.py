"""Numbers that ComfyUI's Math Expression and Resolution Selector compute of others, before a graph runs."""

import ast
import math
import operator
import re
from collections.abc import Callable

#: A longer expression is not read.
MAX_CHARACTERS = 200
#: More digits are not rounded to: Python computes a power of ten with as many.
MAX_DIGITS = 15
#: The ratio in what Resolution Selector is given: "16:9 (Widescreen)".
RATIO = re.compile(r"([1-9]\d?):([1-9]\d?)\b")
MEGA = 1024 * 1024


def _rounded(value: float, *digits: int) -> float:
    """Round as Python does; raise ValueError for more than MAX_DIGITS, which may take hours."""
    if any(abs(each) > MAX_DIGITS for each in digits):
        raise ValueError(f"round takes at most {MAX_DIGITS} digits")
    return round(value, *digits)


OPERATORS: dict[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
FUNCTIONS: dict[str, Callable] = {
    "min": min,
    "max": max,
    "abs": abs,
    "round": _rounded,
    "ceil": math.ceil,
    "floor": math.floor,
    "int": int,
    "float": float,
}


def computed(expression: str, values: dict[str, float]) -> float | None:
    """Return what an expression of numbers and ``values`` is, by names; None where it has more than sums,
    products, remainders and the functions above, or no result. Nothing is evaluated by Python itself."""
    if len(expression) > MAX_CHARACTERS:
        return None
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body, values)
        return result if math.isfinite(result) else None
    except (ArithmeticError, KeyError, SyntaxError, TypeError, ValueError):
        return None  # the node itself says why, when it runs


def resolution(ratio: str, megapixels: float, multiple: int) -> tuple[int, int] | None:
    """Return the width and the height of Resolution Selector; None where these are no such values."""
    try:
        found = RATIO.match(ratio)
        width, height = (int(each) for each in found.groups()) if found else (0, 0)
        scale = math.sqrt(megapixels * MEGA / (width * height))
        return round(width * scale / multiple) * multiple, round(height * scale / multiple) * multiple
    except (ArithmeticError, TypeError, ValueError):
        return None


def _value(node: ast.AST, values: dict[str, float]) -> float:
    """Return the number that a part of an expression is; raise KeyError for what is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return FUNCTIONS[node.func.id](*(_value(each, values) for each in node.args))
    raise KeyError(type(node).__name__)
