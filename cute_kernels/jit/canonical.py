"""Canonical text of Python code: equal for equal code, on every Python version from 3.10 on.

Leaves out comments, formatting and docstrings, and the positions, absent fields and divisions of
f-strings in which syntax trees of different Python versions differ.
"""

import ast
from typing import Any


def canonical_source(source: bytes) -> str:
    """Return the syntax tree of `source` as text."""
    return _canonical(ast.parse(source))


def _canonical(node: Any) -> str:
    if isinstance(node, list):
        return "[" + " ".join(_canonical(item) for item in node if not _is_text(item)) + "]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    if isinstance(node, ast.JoinedStr):
        return f"JoinedStr({''.join(map(_part, node.values))!a})"
    fields = ((name, getattr(node, name, None)) for name in node._fields)
    present = [f"{name}={_canonical(value)}" for name, value in fields if value not in (None, [])]
    if isinstance(node, ast.Constant):  # the constant None has its value
        present = [f"value={node.value!a}"]
    return f"{type(node).__name__}({' '.join(present)})"


def _is_text(statement: Any) -> bool:
    """Return whether a statement is only a string: a docstring of a module, class or field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _part(value: ast.expr) -> str:
    """Return a part of an f-string; Python versions divide its texts differently."""
    return str(value.value) if isinstance(value, ast.Constant) else f"\0{_canonical(value)}\0"
