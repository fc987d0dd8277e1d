"""The import rule: a package imports only packages below it.

    cute_kernels <- autotune_cache (not tuning) <- ops <- autotune_cache.tuning <- cutefce.commands
                                               ops <- integrations

Inside `ops` the folders follow the order of a call, above the records that all of them share.
"""

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.support.package import modules

LAYERS = (
    "cutefce.cute_kernels",
    "cutefce.autotune_cache",
    "cutefce.ops",
    "cutefce.autotune_cache.tuning",
    "cutefce.integrations",
    "cutefce.commands",
)
"""From the lowest to the highest; `cutefce` itself may import every layer."""

OPS_LAYERS = (
    "cutefce.ops.torch_compat",
    "cutefce.ops.schema",
    "cutefce.ops.interface.checks",
    "cutefce.ops.interface.arguments",
    "cutefce.ops.rows",
    "cutefce.ops.primitives",
    "cutefce.ops.parallel",
    "cutefce.ops.program",
    "cutefce.ops.operators",
    "cutefce.ops.interface",
    "cutefce.ops.divergence",
)


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a module, which several rules look at."""
    return ast.parse(source)


def imported(source: str) -> Iterator[str]:
    """Yield what a module imports, also inside functions and by name."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("cutefce."):
            yield str(node.value)


def layer_of(name: str, layers: tuple[str, ...]) -> int | None:
    """Return the number of the most specific layer that `name` is in."""
    found = [layer for layer in layers if name == layer or name.startswith(f"{layer}.")]
    return layers.index(max(found, key=len)) if found else None


def violations(module: str, source: str) -> list[str]:
    result = []
    for name in imported(source):
        for layers in (LAYERS, OPS_LAYERS):
            own, other = layer_of(module, layers), layer_of(name, layers)
            if own is not None and other is not None and other > own:
                result.append(f"{module} imports {name}")
    return result


def test_imports_point_down() -> None:
    every = modules().items()
    assert not [text for module, path in every for text in violations(module, path.read_text())]


class WithoutTypes(ast.NodeTransformer):
    """Removes imports for types alone, which no module runs."""

    def visit_If(self, node: ast.If) -> Any:
        return None if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)


def test_no_module_waits_for_itself() -> None:
    """Imports make no circle, those inside functions and by name included."""
    sources = {module: path.read_text() for module, path in modules().items()}

    def module_of(name: str) -> str:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    depends = {}
    for module, source in sources.items():
        runs = imported(ast.unparse(WithoutTypes().visit(ast.parse(source))))
        found = {module_of(name) for name in runs} - {module, ""}
        depends[module] = {name for name in found if not module.startswith(f"{name}.")}
    graphlib.TopologicalSorter(depends).prepare()  # or it raises CycleError with a circle


def test_what_a_plain_call_does_not_need_is_not_imported() -> None:
    """And torch's counter, imported later, knows the FLOP of every operator."""
    late = "torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter", "transformers"
    code = f"""
import sys, torch, cutefce
assert not [name for name in {late!r} if name in sys.modules]
from torch.utils.flop_counter import flop_registry
names = {{str(operator) for operator in flop_registry}}
assert {{"cutefce.loss_backward", "cutefce.divergence_backward"}} <= names
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_private_names_of_torch_are_in_one_file() -> None:
    private = []
    for module, path in modules().items():
        if module == "cutefce.ops.torch_compat":
            continue
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.Attribute):
                text = ast.unparse(node)
                parts = text.split(".")
                if parts[0] in ("torch", "dist") and any(
                    part.startswith("_") and not part.startswith("__") for part in parts[1:]
                ):
                    private.append(f"{module}: {text}")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch._"):
                private.append(f"{module}: {node.module}")
    assert not private
