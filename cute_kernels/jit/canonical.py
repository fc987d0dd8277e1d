"""Canonical text of Python code: equal for equal code, on every Python version from 3.10 on.

Leaves out comments, formatting and docstrings, and the positions, absent fields and divisions of
f-strings in which syntax trees of different Python versions differ.
"""

import ast
from collections.abc import Callable
from typing import Any

IMPLIED = "ctx"
"""The field of a syntax tree that says whether an expression is read: its place tells that."""


def canonical_source(source: bytes) -> str:
    """Return the syntax tree of `source` as text."""
    parts: list[str] = []
    _write(ast.parse(source), parts.append)
    return "".join(parts)


def _write(node: Any, put: Callable[[str], None]) -> None:
    """Put the parts of a node's text; one list of them takes half of the time of nested texts."""
    if isinstance(node, list):
        put("[")
        for item in node:
            if not _is_text(item):
                _write(item, put)
                put(" ")
        put("]")
    elif isinstance(node, ast.Constant):
        put(f"{node.value!a}")
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:  # Python versions divide its texts differently
            if isinstance(part, ast.Constant):
                put(str(part.value))
            else:
                put("\0")
                _write(part, put)
                put("\0")
    elif isinstance(node, ast.AST):
        put(type(node).__name__)
        put("(")
        for name in node._fields:
            value = getattr(node, name, None)
            if name != IMPLIED and value is not None and value != []:
                put(name)
                put("=")
                _write(value, put)
                put(" ")
        put(")")
    else:
        put(ascii(node))


def _is_text(statement: Any) -> bool:
    """Return whether a statement is only a string: a docstring of a module, class or field."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
