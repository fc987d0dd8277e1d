"""Calls on a device without float64, such as Apple's MPS, as a CPU shows them.

A dispatch mode sees every operator, but changes which way a call takes.  An execution trace of
torch's profiler changes nothing, and lists the results of all operators that ran.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ExecutionTraceObserver
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cutefce.ops import torch_compat

Run = Callable[[], object]


class Float64Seen(TorchDispatchMode):
    """The operators with results in float64."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        results = operator(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in tree_leaves(results)):
            self.names.append(str(operator))
        return results


def seen_by_a_mode(run: Run) -> list[str]:
    """Return the operators with results in float64 while `run` runs in a dispatch mode."""
    mode = Float64Seen()
    with mode:
        run()
    return mode.names


def seen_eagerly(run: Run) -> list[str]:
    """Return the operators with results in float64 while `run` runs as it does for users."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = ExecutionTraceObserver()
        observer.register_callback(str(path))
        observer.start()
        try:
            assert not torch_compat.has_dispatch_mode() and not torch_compat.has_function_mode()
            run()
        finally:
            observer.stop()
            observer.unregister_callback()
        return _float64_results(path)


def _float64_results(trace: Path) -> list[str]:
    """Return the operators of an execution trace with results in float64.

    Read as text, as parsing a large file takes longer than the calls.
    """
    text = trace.read_text()
    assert '"outputs"' in text
    if "Tensor(double)" not in text:
        return []
    names: list[str] = []
    name = ""
    for line in text.splitlines():
        field = line.lstrip().partition(":")[0]
        if field == '"id"':
            name = line.split('"')[5]
        elif field == '"outputs"' and "Tensor(double)" in line:
            names.append(name)
    return names


WAYS = {"eager": seen_eagerly, "in a mode": seen_by_a_mode}


def assert_no_float64(run: Run) -> None:
    """Assert that no operator that `run` calls has a result in float64, with and without a mode."""
    for way, seen in WAYS.items():
        names = seen(run)
        assert not names, f"{way}: {sorted(set(names))}"
