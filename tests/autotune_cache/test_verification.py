"""Before a first launch kernels are verified, and on first use tuned, if that is asked for."""

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
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import first_use, targets, tuner, verify, worker
from cutefce.autotune_cache.tuning.subprocess_worker import Child
from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives import dispatch
from cutefce.ops.primitives.cute import CutePrimitives
from tests.support.fake_tuner import DEVICE, SIZE, STAND_IN, Inline, tune_inline
from tests.support.faulty_candidates import Hanging, Kind, StandIn, config


def test_verification_is_done_once_and_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None
    assert verify.verify_once((STAND_IN,), DEVICE).passed
    assert verdicts.known(Sm90(), DEVICE, SIZE) == verdicts.Verdict(True)
    assert verdicts.known(Sm90(), "NVIDIA Other", SIZE) is None
    (record,) = (folder / "verified").glob("*.json")
    monkeypatch.setattr(verify, "Child", None)
    assert verify.verify_once((STAND_IN,), DEVICE).passed
    record.write_text("half of")
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None
    monkeypatch.setattr(jit_cache, "fingerprint", lambda: "other kernels")
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None


@dataclass
class FakeGpu:
    """What the dispatch sees of a GPU that is not there."""

    capturing: bool = False
    ranks: int = 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    properties = SimpleNamespace(name=DEVICE, multi_processor_count=SIZE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: fake.ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: fake.ranks)
    monkeypatch.setattr(dispatch, "_compiler_unsupported_reason", lambda arch, dtype: None)
    caches = dispatch.gpu_of, dispatch._device_unsupported_reason, dispatch._unverified
    for cache in (*caches, dispatch._cute_primitives):
        cache.cache_clear()
    yield fake
    for cache in (*caches, dispatch._cute_primitives):
        cache.cache_clear()


def test_a_kernel_that_hangs_is_never_launched_here(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a call: not in a capture, once outside, and then never again."""
    monkeypatch.setattr(verify, "CHECK_SECONDS", 2)
    hanging = Hanging(Sm90(), SIZE, "cpu")
    monkeypatch.setattr(targets, "all_tunables", lambda *_: (hanging,))
    device, gpu.capturing = torch.device("cuda", 7), True
    assert "never ran on NVIDIA Test" in str(
        dispatch.device_unsupported_reason(device, torch.bfloat16)
    )
    gpu.capturing = False
    for dtype in (torch.bfloat16, torch.float16):
        reason = str(dispatch.device_unsupported_reason(device, dtype))
        assert "failed on NVIDIA Test 9000" in reason
        assert "no answer within 2 s" in reason
        assert "python -m cutefce verify" in reason
        monkeypatch.setattr(verify, "Child", None)


def test_a_shipped_table_counts_as_verification(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    tune_inline(folder / file_name(DEVICE), range(100, 101), lambda job: None)
    assert verdicts.known(Sm90(), DEVICE, SIZE) == verdicts.Verdict(True)
    with pytest.warns(UserWarning, match="num_sms: got 132"):
        assert verdicts.known(Sm90(), DEVICE, 114) is None


@pytest.mark.parametrize(
    ("variable", "there", "tuned"),
    [
        ("1", FakeGpu(), True),
        ("1", FakeGpu(capturing=True), False),
        ("1", FakeGpu(ranks=2), False),
        ("0", FakeGpu(), False),
    ],
    ids=["asked for", "in a capture", "beside other ranks", "not asked for"],
)
def test_first_use_tunes_what_no_table_has(
    variable: str,
    there: FakeGpu,
    tuned: bool,
    folder: Path,
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(lookup.AUTOTUNE_VARIABLE, variable)
    monkeypatch.setattr(first_use, "Child", Inline)
    monkeypatch.setattr(first_use, "_met", set())
    monkeypatch.setattr(targets, "all_tunables", lambda *_: (STAND_IN,))
    gpu.capturing, gpu.ranks = there.capturing, there.ranks
    problem = STAND_IN.problem((20, 16, 300), "bfloat16")
    expected = config(Kind.FAST) if tuned else Sm90().default(20)
    for tokens in (20, 23):  # the second is in the table
        problem = dataclasses.replace(problem, tokens=tokens)
        steps = dispatch._cute_primitives(torch.device("cuda", 7), problem)
        assert isinstance(steps, CutePrimitives)
        assert steps.project == expected
        monkeypatch.setattr(first_use, "Child", None)
        first_use._met.clear()


def test_first_use_without_a_child_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_met", set())
    monkeypatch.setattr(sys, "executable", "/bin/false")
    problem = STAND_IN.problem((20, 16, 300), "bfloat16")
    with pytest.warns(UserWarning, match="was not tuned: .*exit status 1"):
        first_use.tune_on_first_use((STAND_IN,), DEVICE, problem)
    assert lookup.tables(Sm90(), DEVICE, SIZE) == ()


def test_a_check_without_a_child_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    verdict = verify.verify((STAND_IN,), DEVICE)
    assert not verdict.passed
    assert "not checked" in verdict.reason
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None


BUILT = spec.TargetLogitSpec("sm_90a", "bfloat16")


class Built(StandIn):
    """One kernel to compile."""

    def kernels(self, problem: Problem, choice: Any) -> tuple[spec.KernelSpec, ...]:
        return (BUILT,)


def test_kernels_that_no_folder_keeps_are_compiled_before_the_clock_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    class Asked(Child):
        def ask(self, call: Any, seconds: float) -> Any:
            asked.append((call.func.__name__, seconds))

    monkeypatch.setattr(tuner, "build", lambda *_: {})
    monkeypatch.setattr(verify, "Child", Asked)
    assert verify.verify((Built(Sm90(), SIZE, "cpu"),), DEVICE).passed
    assert asked[:3] == [
        ("load", tuner.BUILD_SECONDS),
        ("prepare", verify.PREPARE_SECONDS),
        ("check", verify.CHECK_SECONDS),
    ]


def test_a_failed_compilation_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "build", lambda *_: {BUILT: "its process ended by SIGKILL"})
    verdict = verify.verify((Built(Sm90(), SIZE, "cpu"),), DEVICE)
    assert verdict == verdicts.Verdict(False, "not checked: its process ended by SIGKILL")
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None


def test_a_process_that_the_system_ends_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Child):
        def ask(self, call: Any, seconds: float) -> Any:
            if call.func is worker.check:
                assert self._process is not None
                self._process.kill()
            return super().ask(functools.partial(int), seconds)

    monkeypatch.setattr(verify, "Child", Killed)
    verdict = verify.verify((STAND_IN,), DEVICE)
    assert "not checked: its process ended by SIGKILL" in verdict.reason
    assert verdicts.known(Sm90(), DEVICE, SIZE) is None


def test_a_verdict_that_no_folder_keeps_holds_for_the_process(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "verified").write_text("a file in the folder's place")
    monkeypatch.setattr(targets, "all_tunables", lambda *_: (STAND_IN,))
    device = torch.device("cuda", 7)
    assert dispatch.device_unsupported_reason(device, torch.bfloat16) is None
    monkeypatch.setattr(verify, "Child", None)
    assert dispatch.device_unsupported_reason(device, torch.float16) is None
