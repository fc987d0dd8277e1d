"""Verification before the first launch."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutefce.autotune_cache import lookup, verdicts
from cutefce.autotune_cache.tables import file_name
from cutefce.autotune_cache.tuning import runner, verify
from cutefce.autotune_cache.tuning.runner import Check, Runner
from cutefce.autotune_cache.verdicts import (
    DIVERGENCES,
    FORWARD,
    OPTIONS,
    PARTS,
    SAMPLES,
    SOFT_TARGETS,
    STEP,
    parts_of,
)
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import TargetLogitSpec
from cutefce.ops.primitives import dispatch
from tests.support.fake_tuner import RUNNER, InProcess, tune_inline
from tests.support.faulty_candidates import FaultyRunner, Kind, config
from tests.support.tables import GPU, OLD, TABLE, VERSIONS, write
from tests.support.tiers import rest_slow

PASSED = verdicts.Verdict(True)
H100 = Gpu(Sm90(), "NVIDIA H100 80GB HBM3", 132)
H20 = Gpu(Sm90(), "NVIDIA H20", 78)
GH200 = Gpu(Sm90(), "NVIDIA GH200 480GB", 132)


def known(dtype: str = "bfloat16", gpu: Gpu = GPU) -> verdicts.Verdict | None:
    """Return the verdict on all that is listed."""
    return verdicts.known(gpu, dtype, *PARTS)


@pytest.fixture(autouse=True)
def no_shipped_tables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of shipped tables, which do not exist."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    return folder / "shipped"


def test_verification_is_done_once_and_recorded_for_the_architecture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known() is None
    assert verify.verify_once(RUNNER, "bfloat16").passed
    assert known() == PASSED
    assert known("float16") is None
    for other in (H100, H20):
        assert known(gpu=other) == PASSED
    assert known(gpu=Gpu(Sm100(), "NVIDIA B200", 148)) is None
    (record,) = (folder / "verified").glob("*.json")
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    assert verify.verify_once(RUNNER, "bfloat16").passed
    written = record.read_text()
    record.write_text("half of")
    assert known() is None
    record.write_text(written)
    monkeypatch.setattr(jit_cache, "fingerprint", lambda: "other kernels")
    assert known() is None


@dataclass
class FakeGpu:
    """State of a GPU without hardware, as the dispatch sees it."""

    capturing: bool = False


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    properties = SimpleNamespace(name=GPU.name, multi_processor_count=GPU.num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(dispatch, "_missing_reason", lambda: None)
    process_cache.reset()
    yield fake
    process_cache.reset()


DEVICE = torch.device("cuda", 7)


def reason(part: str = FORWARD) -> str:
    """Return why a part of bfloat16 calls must not launch its kernels, "None" if it may."""
    return str(dispatch.unproven_reason(DEVICE, "bfloat16", part))


def defaults_are(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the architecture's default be a fake one."""
    monkeypatch.setattr(runner, "Runner", lambda gpu, _: DefaultRunner(gpu, "cpu", kind))


@dataclass(frozen=True)
class DefaultRunner(FaultyRunner):
    """Has one default, of `kind`."""

    kind: Kind = Kind.SLOW

    def base(self) -> KernelConfigs:
        return KernelConfigs(config(self.kind), None, None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """Return a list of the checks that subprocesses would run, of which all pass."""
    checks: list[Check] = []

    def all_pass(own: Runner, _: str, parts: tuple[str, ...], __: Any) -> str:
        checks.extend(own.checks(parts))
        return ""

    monkeypatch.setattr(verify, "first_fault", all_pass)
    monkeypatch.setattr(build, "build", lambda *_, **__: {})
    return checks


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run checks in this process, where wrong results are the only faults."""
    monkeypatch.setattr(verify, "SubprocessWorker", InProcess)


FAULTS: dict[str, tuple[Kind, type[SubprocessWorker], str]] = {
    "wrong": (Kind.WRONG_SUMS, InProcess, "sum of the other exponentials is off"),
    "hangs": (Kind.HANGS, SubprocessWorker, "no answer within 2 s"),
}
"""A fault, what runs the check, and what is said of it."""


@pytest.mark.parametrize("fault", rest_slow(FAULTS))
def test_a_kernel_that_fails_is_never_launched_here(
    fault: tuple[Kind, type[SubprocessWorker], str],
    folder: Path,
    fake_gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Verification runs once outside of a graph capture; its failure is one of the dtype."""
    kind, process, said = fault
    monkeypatch.setattr(verify, "SubprocessWorker", process)
    monkeypatch.setattr(verify, "CHECK_SECONDS", 2)
    defaults_are(kind, monkeypatch)
    assert dispatch.device_unsupported_reason(DEVICE, torch.bfloat16) is None
    fake_gpu.capturing = True
    assert "never ran on NVIDIA Test" in reason()
    fake_gpu.capturing = False
    assert "failed on NVIDIA Test 9000" in reason()
    assert said in reason()
    assert "cutefce verify" in reason()
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    process_cache.reset()
    assert said in reason() and said in reason(STEP)
    assert said in str(dispatch.device_unsupported_reason(DEVICE, torch.bfloat16))
    assert dispatch.device_unsupported_reason(DEVICE, torch.float16) is None


@pytest.mark.slow
def test_a_part_is_checked_once_with_all_that_is_listed(
    folder: Path,
    fake_gpu: FakeGpu,
    asked: list[Check],
) -> None:
    own, expected = Runner(GPU), list[Check]()
    for part in (FORWARD, DIVERGENCES, STEP, OPTIONS, SAMPLES):
        # code of options and of divergences is the same in every configuration
        launched = [own.base()] if part in (DIVERGENCES, OPTIONS) else own.listed_configs()
        expected += [(configs, parts_of(part)) for configs in launched]
        for again in (False, True):
            if again:  # in another process
                process_cache.reset()
            assert reason(part) == "None"
            assert asked == expected
    for other in (H100, H20):  # the same code
        assert verdicts.known(other, "bfloat16", FORWARD, STEP, SAMPLES, DIVERGENCES) == PASSED
        assert verdicts.known(other, "bfloat16", SOFT_TARGETS) is None


@pytest.mark.parametrize("gpu", [H20, GPU, H100, GH200], ids=lambda gpu: str(gpu.name))
def test_a_shipped_table_proves_all_kernels_of_its_architecture(
    gpu: Gpu, no_shipped_tables: Path
) -> None:
    """Other cards execute the same code: tuning has verified all that is listed."""
    tune_inline(no_shipped_tables / file_name(GPU), range(100, 101), lambda job: None)
    assert known(gpu=gpu) == PASSED
    assert known("float16", gpu) is None, "the table has no entry of this dtype"
    assert known(gpu=Gpu(Sm100(), "NVIDIA B200", 148)) is None


def test_a_table_of_another_build_or_of_the_user_is_no_proof(no_shipped_tables: Path) -> None:
    path = no_shipped_tables / file_name(GPU)
    for name in OLD:
        write(path, dataclasses.replace(TABLE, versions={**VERSIONS, name: OLD[name]}))
        process_cache.reset()
        assert known() is None
    write(lookup.user_folder() / file_name(GPU), TABLE)
    assert known() is None


def test_a_failure_is_recorded_and_outweighs_the_shipped_table(
    no_shipped_tables: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(no_shipped_tables / file_name(GPU), TABLE)
    assert known() == PASSED
    monkeypatch.setattr(verify, "first_fault", lambda *_: "a kernel is wrong")
    assert not verify.verify(RUNNER, "bfloat16").passed
    assert known() == verdicts.Verdict(False, "a kernel is wrong")
    assert not verify.verify_once(RUNNER, "bfloat16").passed
    monkeypatch.setattr(verify, "first_fault", lambda *_: "")
    assert verify.verify(RUNNER, "bfloat16").passed
    assert known() == PASSED


@pytest.mark.slow
def test_one_wrong_configuration_of_several_fails_all(
    folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = Kind.FAST, Kind.WRONG_SUMS, Kind.SLOW
    monkeypatch.setattr(
        FaultyRunner,
        "listed_configs",
        lambda _: [KernelConfigs(config(kind), None, None) for kind in kinds],
    )
    verdict = verify.verify(RUNNER, "bfloat16")
    assert not verdict.passed
    assert f"project_exp {config(Kind.WRONG_SUMS)}" in verdict.reason
    assert "sum of the other exponentials" in verdict.reason


def test_a_process_that_waited_uses_what_the_other_found(
    folder: Path, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def meanwhile(path: Path) -> Iterator[None]:
        for dtype in GPU.arch.dtypes:
            verdicts.record(GPU, dtype, PASSED, PARTS)
        yield

    monkeypatch.setattr(cache_files, "lock", meanwhile)
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    assert reason() == "None"
    assert verify.verify_once(Runner(GPU, "cpu"), "float16").passed


def test_a_check_without_a_subprocess_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    verdict = verify.verify(RUNNER, "bfloat16")
    assert not verdict.passed
    assert "not checked" in verdict.reason
    assert known() is None


BUILT = TargetLogitSpec("sm_90a", "bfloat16")


class BuiltRunner(FaultyRunner):
    """Needs one kernel to be compiled."""

    def kernels(self, *_: Any) -> tuple[KernelSpec, ...]:
        return (BUILT,)


def test_kernels_that_cannot_be_stored_are_compiled_outside_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    class Asked(SubprocessWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            done.append((call.func.__name__, seconds))
            if call.func.__name__ == "prepare":
                call()

    monkeypatch.setattr(Runner, "_prepared", lambda *_: None)
    monkeypatch.setattr(jit_cache, "compiled", done.append)
    monkeypatch.setattr(build, "build", lambda *_, **__: {})
    monkeypatch.setattr(verify, "SubprocessWorker", Asked)
    assert verify.verify(BuiltRunner(GPU, "cpu"), "bfloat16").passed
    prepare, check = ("prepare", verify.PREPARE_SECONDS), ("check", verify.CHECK_SECONDS)
    assert done[:3] == [prepare, BUILT, check]


def test_a_failed_compilation_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda *_, **__: {BUILT: "its process ended by SIGKILL"})
    verdict = verify.verify(BuiltRunner(GPU, "cpu"), "bfloat16")
    assert verdict == verdicts.Verdict(False, "not checked: its process ended by SIGKILL")
    assert known() is None


class Killed(SubprocessWorker):
    """Has a process that the system ends during the first check."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func.__name__ == "check":
            assert self._process is not None
            self._process.kill()
        return super().ask(functools.partial(int), seconds)


class SaidToBeKilled(InProcess):
    """Answers the first check as if it were."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func.__name__ == "check":
            raise WorkerError("its process ended by SIGKILL")


@pytest.mark.parametrize(
    "process", rest_slow({"said to be": SaidToBeKilled, "in a subprocess": Killed})
)
def test_a_process_killed_by_the_system_is_no_verdict(
    process: type[SubprocessWorker], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "SubprocessWorker", process)
    verdict = verify.verify(RUNNER, "bfloat16")
    assert "not checked: its process ended by SIGKILL" in verdict.reason
    assert known() is None


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT: KeyboardInterrupt", "SIGUSR1"])
def test_a_signal_to_the_job_is_no_verdict(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler sends it to all processes; a training that handles it goes on."""

    def ask(process: InProcess, call: Any, seconds: float) -> Any:
        if call.func.__name__ == "check":
            raise WorkerError(f"its process ended by {name}")

    monkeypatch.setattr(InProcess, "ask", ask)
    monkeypatch.setattr(verify, "SubprocessWorker", InProcess)
    assert f"not checked: its process ended by {name}" in verify.verify(RUNNER, "bfloat16").reason
    assert known() is None


@pytest.mark.slow
def test_a_verdict_that_cannot_be_recorded_holds_for_the_process(
    folder: Path, fake_gpu: FakeGpu, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "verified").write_text("a file instead of the folder")
    defaults_are(Kind.SLOW, monkeypatch)
    for _ in range(2):
        assert reason() == "None"
        monkeypatch.setattr(verify, "SubprocessWorker", None)
