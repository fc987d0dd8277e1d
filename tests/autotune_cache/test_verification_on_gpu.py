"""Verification before the first launch, on a GPU, of hanging, wrong and right kernels.

Compiled kernels are the user's, which saves compiling; verdicts are the test's.
"""

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import cutefce
from cutefce.autotune_cache import lookup, verdicts
from cutefce.autotune_cache.tuning import runner, verify
from cutefce.autotune_cache.verdicts import STEP, parts_of
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.arch import arch_for
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker
from cutefce.ops.primitives import dispatch
from tests.support.faulty_candidates import KernelRunner, Kind
from tests.support.reference import assert_as_accurate, ours, random_case

HERE = arch_for(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
LIMIT_SECONDS = 5

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE is None, reason="needs a GPU that has kernels"),
]


@dataclass
class Gate:
    """A GPU model on which no kernel ran yet, and the subprocesses that verified."""

    kind: Kind = Kind.FAST
    """Behavior of the kernels under test."""
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def runner(self, gpu: Gpu, device: str) -> KernelRunner:
        return KernelRunner(gpu, device, self.kind)

    def verdict(self) -> verdicts.Verdict | None:
        """Return the recorded verdict on the step of the calls below."""
        gpu = dispatch.gpu_of(torch.device("cuda", 0))
        return verdicts.known(gpu, "bfloat16", *parts_of(STEP))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    libraries, gate = jit_cache.cache_folder(), Gate()
    libraries.mkdir(parents=True, exist_ok=True)
    (tmp_path / libraries.name).symlink_to(libraries, target_is_directory=True)
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", tmp_path / "no tables")
    monkeypatch.setattr(runner, "Runner", gate.runner)

    class Recorded(SubprocessWorker):
        def _start(self) -> None:
            super()._start()
            assert self._process is not None
            gate.processes.append(self._process)

    monkeypatch.setattr(verify, "SubprocessWorker", Recorded)
    return gate


@pytest.fixture(autouse=True)
def new_process() -> Iterator[Callable[[], None]]:
    """Clear the caches of this process, before and after."""
    process_cache.reset()
    yield process_cache.reset
    process_cache.reset()


FAULTS = {
    Kind.HANGS: f"no answer within {LIMIT_SECONDS} s",
    Kind.CRASHES: "cuda error",
    Kind.WRONG_SUMS: "sum of the other exponentials",
    Kind.WRONG_GRADIENTS: "dw, stored 1 is off by",
}


@pytest.mark.parametrize(("kind", "said"), FAULTS.items(), ids=[kind.name for kind in FAULTS])
def test_a_fault_ends_with_the_subprocess(
    kind: Kind, said: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.kind = kind
    if kind is Kind.HANGS:
        monkeypatch.setattr(verify, "CHECK_SECONDS", LIMIT_SECONDS)
    case = random_case(300, 64, 1500, dtype=torch.bfloat16, device="cuda")
    backend = cutefce.backend_for(case.h, case.w)
    assert backend.name == "triton"
    assert said in backend.reason.lower()
    (process,) = gate.processes
    assert process.returncode is not None, "it has ended"
    verdict = gate.verdict()
    assert verdict is not None
    assert not verdict.passed
    assert said in verdict.reason.lower()
    with pytest.warns(UserWarning, match="served by") as warned:
        for _ in range(2):
            assert_as_accurate(ours(case), case)
    (warning,) = (str(w.message) for w in warned if "served by" in str(w.message))
    assert said in warning.lower()
    assert len(gate.processes) == 1


def test_kernels_serve_once_they_passed(gate: Gate, new_process: Callable[[], None]) -> None:
    case = random_case(300, 64, 1500, dtype=torch.bfloat16, device="cuda")
    graph, gate.kind = torch.cuda.CUDAGraph(), Kind.WRONG_SUMS
    with torch.no_grad(), pytest.warns(UserWarning, match="failed on"):
        portable = cutefce.linear_cross_entropy(case.h, case.w, case.y)
    next((lookup.user_folder().parent / "verified").glob("*.json")).unlink()
    new_process()
    gate.kind = Kind.FAST
    with torch.no_grad(), pytest.warns(UserWarning, match="never ran on"), torch.cuda.graph(graph):
        captured = cutefce.linear_cross_entropy(case.h, case.w, case.y)
    graph.replay()
    assert torch.equal(captured, portable)
    assert gate.verdict() is None
    assert cutefce.backend_for(case.h, case.w).name == "cute"
    assert gate.verdict() == verdicts.Verdict(True)
    dispatch.set_strict(True)
    try:
        assert_as_accurate(ours(case), case)
    finally:
        dispatch.set_strict(False)
    count = len(gate.processes)
    new_process()
    assert cutefce.backend_for(case.h, case.w).name == "cute"
    assert_as_accurate(ours(case), case)
    assert len(gate.processes) == count, "the verdicts are read"
