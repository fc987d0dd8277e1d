"""Lines of Python code without its text: what fingerprints cover, on every Python version."""

import ast
import io
import tokenize


def canonical_source(source: bytes) -> str:
    """Return the lines of `source` without docstrings, comments and blank lines.

    A docstring shares its lines with no code.
    """
    lines = source.decode().split("\n")
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                first, last = node.lineno - 1, node.end_lineno or node.lineno
                lines[first:last] = [""] * (last - first)
    return "\n".join(line.rstrip() for line in lines if line.strip())
