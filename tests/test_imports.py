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
from collections.abc import Iterable, Iterator

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
def parsed() -> dict[str, ast.Module]:
    """Return the trees of all modules by their names, which several rules look at."""
    return {module: ast.parse(path.read_text()) for module, path in modules().items()}


def what_runs(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree but for those of imports for types alone."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            nodes += ast.iter_child_nodes(node)


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield what code imports, also inside functions and by name."""
    for node in nodes:
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


def violations(module: str, tree: ast.Module) -> list[str]:
    result = []
    for name in imported(ast.walk(tree)):
        for layers in (LAYERS, OPS_LAYERS):
            own, other = layer_of(module, layers), layer_of(name, layers)
            if own is not None and other is not None and other > own:
                result.append(f"{module} imports {name}")
    return result


def test_imports_point_down() -> None:
    assert not [text for module, tree in parsed().items() for text in violations(module, tree)]


def test_no_module_waits_for_itself() -> None:
    """Imports make no circle, those inside functions and by name included."""

    def module_of(name: str) -> str:
        while name and name not in parsed():
            name = name.rpartition(".")[0]
        return name

    depends = {}
    for module, tree in parsed().items():
        found = {module_of(name) for name in imported(what_runs(tree))} - {module, ""}
        depends[module] = {name for name in found if not module.startswith(f"{name}.")}
    graphlib.TopologicalSorter(depends).prepare()  # or it raises CycleError with a circle


def test_what_a_plain_call_does_not_need_is_not_imported() -> None:
    """And torch's counter, imported later, knows the FLOP of every operator."""
    late = (
        *("torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter"),
        *("transformers", "cutlass"),
    )
    code = f"""
import sys, torch, cutefce
assert not torch.cuda.is_initialized()
assert not [name for name in {late!r} if name in sys.modules]
from torch.utils.flop_counter import flop_registry
names = {{str(operator) for operator in flop_registry}}
assert {{"cutefce.loss_backward", "cutefce.divergence_backward"}} <= names
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_integrations_are_imported_when_they_are_named() -> None:
    code = """
import sys, cutefce
assert "cutefce.integrations.report" not in sys.modules
assert cutefce.integrations.report.integration_report() == {}
assert not hasattr(cutefce.integrations, "absent")
sys.modules["axolotl"] = None
try:
    cutefce.integrations.axolotl
except ModuleNotFoundError as error:
    assert error.name.startswith("axolotl")
else:
    raise AssertionError("no error of a framework that is not installed")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_private_names_of_torch_are_in_one_file() -> None:
    private = []
    for module, tree in parsed().items():
        if module == "cutefce.ops.torch_compat":
            continue
        for node in ast.walk(tree):
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
