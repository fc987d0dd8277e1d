"""What keeps the package readable: long argument lists and modules say why and what they are."""

import ast

from tests.support.package import modules

MAX_PARAMETERS = 8


def test_long_argument_lists_have_a_reason() -> None:
    """A function of more than eight parameters says why in its docstring."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or "overload" in map(
                ast.unparse, node.decorator_list
            ):
                continue
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS:
                assert "arameter" in (ast.get_docstring(node) or ""), f"{path}: {node.name}"


def test_modules_say_what_they_hold() -> None:
    for path in modules().values():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 15 and "TODO" not in text, path
