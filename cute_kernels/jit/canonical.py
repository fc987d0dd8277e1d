"""Lines of Python code without its text: what fingerprints cover, on every Python version."""

import ast
import re

STRINGS = r'"{3}(?:\\[\s\S]|[^\\])*?"{3}', r"'{3}(?:\\[\s\S]|[^\\])*?'{3}", r'"(?:\\.|[^\\"\n])*"'
STRING_OR_COMMENT = re.compile("|".join((*STRINGS, r"'(?:\\.|[^\\'\n])*'", "(?P<comment>#.*)")))


def canonical_source(source: bytes) -> str:
    """Return the lines of `source` without docstrings, comments and blank lines.

    A docstring shares its lines with no code.
    """
    text = source.decode()
    code = STRING_OR_COMMENT.sub(lambda found: "" if found["comment"] else found[0], text)
    lines = code.split("\n")
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            assert node.end_lineno is not None
            for row in range(node.lineno - 1, node.end_lineno):
                lines[row] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())
