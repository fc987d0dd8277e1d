"""Calls on a device without float64, such as Apple's MPS, as a CPU shows them."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ExecutionTraceObserver


def float64_results(run: Callable[[], object]) -> list[str]:
    """Return the operators with results in float64 while `run` runs.

    A dispatch mode would change which way a call takes.  An execution trace of torch's profiler
    changes nothing, and lists the results of all operators that ran.  It is read as text, as
    parsing a large file takes longer than the calls.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        observer = ExecutionTraceObserver()
        observer.register_callback(str(path))
        observer.start()
        try:
            run()
        finally:
            observer.stop()
            observer.unregister_callback()
        text = path.read_text()
    assert '"outputs"' in text
    names: list[str] = []
    name = ""
    for line in text.splitlines() if "Tensor(double)" in text else []:
        field = line.lstrip().partition(":")[0]
        if field == '"id"':
            name = line.split('"')[5]
        elif field == '"outputs"' and "Tensor(double)" in line:
            names.append(name)
    return names


def assert_no_float64(run: Callable[[], object]) -> None:
    """Assert that no operator that `run` calls has a result in float64."""
    names = float64_results(run)
    assert not names, sorted(set(names))
