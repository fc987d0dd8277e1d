"""What keeps the package readable: long argument lists and modules say why and what they are."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_PARAMETERS = 8


def sources() -> list[Path]:
    folders = ("cutefce", "integrations", "ops", "autotune_cache", "cute_kernels")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in paths if not any(parent.is_symlink() for parent in path.parents)]


def test_long_argument_lists_have_a_reason() -> None:
    """A function of more than eight parameters says why in its docstring."""
    for path in sources():
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
    for path in sources():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 15 and "TODO" not in text, path
