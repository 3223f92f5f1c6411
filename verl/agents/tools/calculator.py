"""The packaged calculator: arithmetic of a text, by its syntax tree and never by `eval`."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from verl.agents.tools.base import ToolArgumentError

MAX_CHARACTERS = 200  # of an expression
MAX_BITS = 1000  # of a number: a longer one could keep a core busy
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda one, other: Fraction(one // other),
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers joined by + - * / // % ** and parentheses, such as "12 * (3 + 4)".

    Returns:
        The exact value if it is a whole number, otherwise a decimal number.

    Raises:
        ToolArgumentError: the text is no such expression, divides by zero, or is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolArgumentError(
            f"An expression may have {MAX_CHARACTERS} characters, got {len(expression)}."
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolArgumentError(f"Not an arithmetic expression: {expression!r}.") from error

    value = _value(tree.body)
    if value.denominator == 1:
        return str(value.numerator)
    return repr(float(value))


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of a node of the syntax tree."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _limited(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand

    if not isinstance(node, ast.BinOp):
        raise ToolArgumentError(f"Expected numbers and + - * / // % **, got '{ast.unparse(node)}'.")
    left = _value(node.left)
    right = _value(node.right)
    if isinstance(node.op, ast.Pow):
        return _power(left, right)
    if type(node.op) not in _OPERATIONS:
        raise ToolArgumentError(f"Expected + - * / // % **, got '{ast.unparse(node)}'.")
    if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
        raise ToolArgumentError(f"Division by zero in '{ast.unparse(node)}'.")
    return _limited(_OPERATIONS[type(node.op)](left, right))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1:
        raise ToolArgumentError("An exponent must be a whole number.")
    if abs(exponent) * bits > MAX_BITS:
        raise ToolArgumentError(f"A number may have {MAX_BITS} bits; this power has more.")
    if base == 0 and exponent < 0:
        raise ToolArgumentError("Division by zero in a negative power of 0.")
    return base**exponent.numerator


def _limited(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolArgumentError(f"A number may have {MAX_BITS} bits, this one has more.")
    return value
