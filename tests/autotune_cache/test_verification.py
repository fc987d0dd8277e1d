"""Verification before the first launch, and tuning at the first call for users who ask for it."""

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

from cutefce.autotune_cache import lookup, table, table_io, verdicts
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import first_use, targets, tuner, verify, worker
from cutefce.autotune_cache.tuning.subprocess_worker import SubprocessWorker
from cutefce.cute_kernels import cache_files, process_cache, spec
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.variant import PLAIN
from cutefce.ops.primitives import dispatch
from tests.support.fake_tuner import TARGET, InlineWorker, tune_inline
from tests.support.faulty_candidates import FaultyTarget, HangingTarget, Kind, config
from tests.support.tables import DSL, ENTRY, GPU, KERNELS, KEY, PROBLEM, TABLE


def test_verification_is_done_once_and_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdicts.known(GPU, "bfloat16") is None
    assert verify.verify_once((TARGET,), "bfloat16").passed
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    assert verdicts.known(GPU, "float16") is None
    for other in ({"name": "NVIDIA Other"}, {"num_sms": 114}):
        assert verdicts.known(dataclasses.replace(GPU, **other), "bfloat16") is None
    (record,) = (folder / "verified").glob("*.json")
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    assert verify.verify_once((TARGET,), "bfloat16").passed
    written = record.read_text()
    record.write_text("half of")
    assert verdicts.known(GPU, "bfloat16") is None
    record.write_text(written)
    monkeypatch.setattr(jit_cache, "fingerprint", lambda: "other kernels")
    assert verdicts.known(GPU, "bfloat16") is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[]",
        '{"configs": 3}',
        '{"configs": [[]], "passed": true, "reason": ""}',
        "{}",
    ],
    ids=["nested without end", "a list", "a number", "a list in a list", "empty"],
)
def test_a_damaged_verdict_is_none(text: str, folder: Path) -> None:
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), set())
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    verdicts.record_path(GPU, "bfloat16").write_text(text)
    assert verdicts.known(GPU, "bfloat16") is None


@pytest.mark.parametrize("part", ["the verdict", "its folder", "the cache folder"])
def test_a_verdict_that_others_may_have_written_is_none(part: str, folder: Path) -> None:
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), set())
    file = verdicts.record_path(GPU, "bfloat16")
    path = {"the verdict": file, "its folder": file.parent, "the cache folder": folder}[part]
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.warns(UserWarning, match=f"ignored {path}: .*chmod go-w"):
        assert verdicts.known(GPU, "bfloat16") is None
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(False, "slow"), set())
    path.chmod(path.stat().st_mode & ~0o020)
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True), "it was not replaced"


@dataclass
class FakeGpu:
    """State of a GPU without hardware, as the dispatch sees it."""

    capturing: bool = False
    ranks: int = 1


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    properties = SimpleNamespace(name=GPU.name, multi_processor_count=GPU.num_sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: fake.ranks > 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: fake.ranks)
    monkeypatch.setattr(dispatch, "_compiler_unsupported_reason", lambda arch, dtype: None)
    process_cache.reset()
    yield fake
    process_cache.reset()


def test_a_kernel_that_hangs_is_never_launched_here(
    folder: Path, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification runs once outside of a graph capture, for each dtype."""
    monkeypatch.setattr(verify, "CHECK_SECONDS", 2)
    monkeypatch.setattr(targets, "all_targets", lambda *_: (HangingTarget(GPU, "cpu"),))
    device, fake_gpu.capturing = torch.device("cuda", 7), True
    assert "never ran on NVIDIA Test" in str(
        dispatch.device_unsupported_reason(device, torch.bfloat16)
    )
    fake_gpu.capturing = False
    for dtype in (torch.bfloat16, torch.float16):
        reason = str(dispatch.device_unsupported_reason(device, dtype))
        assert "failed on NVIDIA Test 9000" in reason
        assert "no answer within 2 s" in reason
        assert "cutefce verify" in reason
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    for dtype in (torch.bfloat16, torch.float16):
        assert "no answer" in str(dispatch.device_unsupported_reason(device, dtype))


def test_a_shipped_table_counts_as_verification(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    tune_inline(folder / file_name(GPU), range(100, 101), lambda job: None)
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    assert verdicts.known(GPU, "float16") is None, "the table has no entry of this dtype"
    with pytest.warns(UserWarning, match="num_sms: got 132"):
        assert verdicts.known(dataclasses.replace(GPU, num_sms=114), "bfloat16") is None


OTHER_KEY = dataclasses.replace(KEY, vocab=32000)
OTHER_CONFIG = config(Kind.FAST)
FOREIGN: dict[str, dict[str, Any]] = {
    "other kernels": {"kernels": "0123"},
    "another compiler": {"dsl": "0.1"},
}
"""What an entry is of whose choice is used and whose proof is not."""
foreign_builds = pytest.mark.parametrize("changes", FOREIGN.values(), ids=FOREIGN)


@pytest.mark.parametrize(
    ("changes", "is_proof"),
    [({}, True), *((foreign, False) for foreign in FOREIGN.values()), ({"verified": False}, False)],
    ids=["these kernels", *FOREIGN, "not verified"],
)
def test_only_verified_entries_of_these_kernels_and_compiler_are_proof(
    changes: dict[str, Any], is_proof: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    entries = {KEY: dataclasses.replace(ENTRY, **changes)}
    table_io.write(folder / file_name(GPU), dataclasses.replace(TABLE, entries=entries))
    assert verdicts.known(GPU, "bfloat16") == (verdicts.Verdict(True) if is_proof else None)
    assert verdicts.known(GPU, "float16") is None


@foreign_builds
@pytest.mark.parametrize("owner", ["shipped", "user"])
def test_one_entry_of_this_build_is_no_proof_for_those_of_another(
    owner: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are updated piecewise, so that each configuration in use must be verified."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    shipped, user = folder / "shipped" / file_name(GPU), lookup.user_folder() / file_name(GPU)
    foreign = dataclasses.replace(ENTRY, config=OTHER_CONFIG, **changes)
    new = dataclasses.replace(TABLE, rejected={})
    old = dataclasses.replace(new, entries={OTHER_KEY: foreign})
    table_io.write(shipped, new)
    table_io.update(shipped if owner == "shipped" else user, old)
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") is None
    assert verdicts.known(GPU, "float16") is None
    proof = dataclasses.replace(foreign, dsl=DSL, kernels=KERNELS)
    table_io.update(shipped, dataclasses.replace(new, entries={KEY: proof}))
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True), "by an entry of another key"


@foreign_builds
def test_a_recorded_verdict_covers_the_configurations_that_it_checked(
    changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "run_checks", lambda *_: iter(()))
    user = lookup.user_folder() / file_name(GPU)
    foreign = dataclasses.replace(ENTRY, config=OTHER_CONFIG, **changes)
    table_io.write(user, dataclasses.replace(TABLE, entries={OTHER_KEY: foreign}, rejected={}))
    assert verdicts.known(GPU, "bfloat16") is None
    assert verify.verify((TARGET,), "bfloat16").passed
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    another = dataclasses.replace(foreign, config=dataclasses.replace(OTHER_CONFIG, stages=5))
    table_io.update(user, dataclasses.replace(TABLE, entries={KEY: another}, rejected={}))
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") is None, "this one was not checked"
    table_io.update(user, dataclasses.replace(TABLE, entries={KEY: ENTRY}, rejected={}))
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)


@foreign_builds
def test_a_tuned_configuration_that_fails_is_rejected_alone(
    changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defaults still serve, so that one bad entry does not cost the kernels."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    user = lookup.user_folder() / file_name(GPU)
    wrong, right = config(Kind.WRONG_SUMS), config(Kind.FAST)
    entries = {
        KEY: dataclasses.replace(ENTRY, config=wrong, **changes),
        OTHER_KEY: dataclasses.replace(ENTRY, config=right, **changes),
    }
    tuned = dataclasses.replace(TABLE, entries=entries, rejected={})
    table_io.write(folder / "shipped" / file_name(GPU), tuned)
    table_io.write(user, tuned)
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") is None
    with pytest.warns(UserWarning, match="is rejected: .*sum of the other exponentials"):
        assert verify.verify((TARGET,), "bfloat16").passed
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    served = [entry.config for found in lookup.tables(GPU) for entry in found.entries.values()]
    assert served == [right, right], "from the user's table and the shipped one"
    assert "sum of the other exponentials" in table_io.read(user).rejected[KEY, wrong].reason


def test_the_first_call_after_a_change_of_the_kernels_verifies_what_was_tuned(
    folder: Path, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched here before, and then the defaults in place of what failed."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    entries = {
        KEY: dataclasses.replace(ENTRY, config=config(Kind.WRONG_SUMS)),
        dataclasses.replace(KEY, vocab=4096): dataclasses.replace(ENTRY, config=OTHER_CONFIG),
    }
    tuned = dataclasses.replace(TABLE, entries=entries, rejected={})
    table_io.write(folder / "shipped" / file_name(GPU), tuned)
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    monkeypatch.setattr(jit_cache, "source_fingerprint", lambda: "other kernels")
    process_cache.reset()
    small = dataclasses.replace(PROBLEM, vocab=4096)
    assert lookup.kernel_configs(PROBLEM, GPU).project_exp == config(Kind.WRONG_SUMS)
    device, fake_gpu.capturing = torch.device("cuda", 7), True
    assert "never ran on" in str(dispatch.device_unsupported_reason(device, torch.bfloat16))
    fake_gpu.capturing = False
    with pytest.warns(UserWarning, match="is rejected: .*sum of the other exponentials"):
        assert dispatch.device_unsupported_reason(device, torch.bfloat16) is None
    assert lookup.kernel_configs(PROBLEM, GPU).project_exp == Sm90().default(8192)
    assert lookup.kernel_configs(small, GPU).project_exp == OTHER_CONFIG
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    process_cache.reset()
    assert dispatch.device_unsupported_reason(device, torch.bfloat16) is None


def test_a_failing_default_rejects_nothing_and_outweighs_the_shipped_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails defaults and tuned configurations alike, such as a driver, may be repaired."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    user = lookup.user_folder() / file_name(GPU)
    tuned = dataclasses.replace(TABLE, entries={KEY: ENTRY}, rejected={})
    table_io.write(folder / "shipped" / file_name(GPU), tuned)
    foreign = dataclasses.replace(ENTRY, config=config(Kind.WRONG_SUMS))
    table_io.write(user, dataclasses.replace(tuned, entries={KEY: foreign}))
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
    asked: list[Any] = []

    def all_fail(checks: list[verify.Check], advance: Any) -> Iterator[tuple[verify.Check, str]]:
        for check in checks:
            asked.append(check.candidate)
            yield check, "wrong"

    monkeypatch.setattr(verify, "run_checks", all_fail)
    assert not verify.verify((TARGET,), "bfloat16").passed
    assert asked == [config(Kind.SLOW)], "the default first, and nothing after its failure"
    assert not table_io.read(user).rejected
    verdict = verdicts.known(GPU, "bfloat16")
    assert verdict is not None
    assert "wrong" in verdict.reason


def test_a_process_that_waited_uses_what_the_other_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = lookup.user_folder() / file_name(GPU)
    wrong = dataclasses.replace(ENTRY, config=config(Kind.WRONG_SUMS), kernels="0123")
    tuned = dataclasses.replace(TABLE, entries={KEY: wrong}, rejected={})
    table_io.write(user, tuned)
    process_cache.reset()
    assert verdicts.known(GPU, "bfloat16") is None
    rejection = table.Rejection("wrong", for_all_shapes=True)
    rejected = {(KEY, wrong.config): rejection}
    table_io.update(user, dataclasses.replace(tuned, entries={}, rejected=rejected))
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), set())
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    assert verify.verify_once((TARGET,), "bfloat16").passed
    assert not any(found.entries for found in lookup.tables(GPU))


@pytest.mark.parametrize(
    ("variable", "state", "tuned"),
    [
        ("1", FakeGpu(), True),
        ("1", FakeGpu(capturing=True), False),
        ("1", FakeGpu(ranks=2), False),
        ("0", FakeGpu(), False),
    ],
    ids=["enabled", "in a graph capture", "with other ranks", "disabled"],
)
def test_first_use_tunes_problems_that_no_table_has(
    variable: str,
    state: FakeGpu,
    tuned: bool,
    folder: Path,
    fake_gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(lookup.AUTOTUNE_VARIABLE, variable)
    monkeypatch.setattr(first_use, "SubprocessWorker", InlineWorker)
    process_cache.reset()
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), set())
    fake_gpu.capturing, fake_gpu.ranks = state.capturing, state.ranks
    problem = TARGET.problem((20, 16, 300), "bfloat16")
    expected = config(Kind.FAST) if tuned else Sm90().default(20)
    for tokens in (20, 23):  # the second is in the table
        problem = dataclasses.replace(problem, tokens=tokens)
        _, kernels, _ = dispatch.kernels_for(torch.device("cuda", 7), problem, PLAIN)
        assert kernels.row_sums.config == expected
        monkeypatch.setattr(first_use, "SubprocessWorker", None)
        process_cache.reset()


def test_first_use_does_not_tune_again_what_was_tuned_with_other_kernels(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    stale = dataclasses.replace(TABLE, entries={KEY: dataclasses.replace(ENTRY, kernels="0123")})
    table_io.write(lookup.user_folder() / file_name(GPU), stale)
    monkeypatch.setattr(first_use, "SubprocessWorker", None)
    first_use.tune_on_first_use(GPU, "cpu", PROBLEM)
    assert lookup.tables(GPU) == (stale,)


def test_what_other_processes_wrote_during_tuning_is_verified(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuning reads the tables again, which processes with other kernels may have changed."""
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    monkeypatch.setattr(verify, "run_checks", lambda *_: iter(()))
    verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), set())
    another = dataclasses.replace(OTHER_CONFIG, stages=5)  # not the one that tuning proves
    foreign = dataclasses.replace(ENTRY, config=another, kernels="0123")

    class Interrupted(InlineWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            path = lookup.user_folder() / file_name(GPU)
            table_io.update(path, dataclasses.replace(TABLE, entries={OTHER_KEY: foreign}))
            return super().ask(call, seconds)

    monkeypatch.setattr(first_use, "SubprocessWorker", Interrupted)
    assert not verdicts.unproven(GPU, "bfloat16")
    first_use.tune_on_first_use(GPU, "cpu", TARGET.problem((20, 16, 300), "bfloat16"))
    assert verdicts.unproven(GPU, "bfloat16")
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)


def test_first_use_without_a_subprocess_is_warned_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    process_cache.reset()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    problem = TARGET.problem((20, 16, 300), "bfloat16")
    with pytest.warns(UserWarning, match="was not tuned: .*exit status 1"):
        first_use.tune_on_first_use(GPU, "cpu", problem)
    assert lookup.tables(GPU) == ()


def test_first_use_without_a_cache_folder_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, "relative")
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    process_cache.reset()
    problem = TARGET.problem((20, 16, 300), "bfloat16")
    with pytest.warns(UserWarning, match="was not tuned: no cache folder"):
        first_use.tune_on_first_use(GPU, "cpu", problem)
    process_cache.reset()


def test_a_check_without_a_subprocess_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    verdict = verify.verify((TARGET,), "bfloat16")
    assert not verdict.passed
    assert "not checked" in verdict.reason
    assert verdicts.known(GPU, "bfloat16") is None


BUILT = spec.TargetLogitSpec("sm_90a", "bfloat16")


class BuiltTarget(FaultyTarget):
    """Needs one kernel to be compiled."""

    def kernels(self, problem: Problem, candidate: Any) -> tuple[spec.KernelSpec, ...]:
        return (BUILT,)


def test_kernels_that_cannot_be_stored_are_compiled_outside_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    class Asked(SubprocessWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            asked.append((call.func.__name__, seconds))

    monkeypatch.setattr(tuner, "build", lambda *_: {})
    monkeypatch.setattr(verify, "SubprocessWorker", Asked)
    assert verify.verify((BuiltTarget(GPU, "cpu"),), "bfloat16").passed
    assert asked[:3] == [
        ("load", tuner.BUILD_SECONDS),
        ("prepare", tuner.PREPARE_SECONDS),
        ("check_small", verify.CHECK_SECONDS),
    ]


def test_a_tuned_configuration_that_no_longer_compiles_is_rejected_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = lookup.user_folder() / file_name(GPU)
    stale = dataclasses.replace(ENTRY, config=OTHER_CONFIG, kernels="0123")
    table_io.write(user, dataclasses.replace(TABLE, entries={KEY: stale}, rejected={}))
    monkeypatch.setattr(verify.Check, "kernels", lambda check: (check.candidate,))
    monkeypatch.setattr(tuner, "missing", list)
    monkeypatch.setattr(tuner, "build", lambda *_: {OTHER_CONFIG: "16 bytes spilled"})
    ran: list[Any] = []

    def all_pass(checks: list[verify.Check], advance: Any) -> Iterator[tuple[verify.Check, None]]:
        for check in checks:
            ran.append(check.candidate)
            yield check, None

    monkeypatch.setattr(verify, "run_checks", all_pass)
    with pytest.warns(UserWarning, match="is rejected: 16 bytes spilled"):
        assert verify.verify((TARGET,), "bfloat16").passed
    assert ran == [config(Kind.SLOW)]
    assert table_io.read(user).rejected[KEY, OTHER_CONFIG].reason == "16 bytes spilled"
    assert lookup.entry_for("project_exp", PROBLEM, GPU) is None
    assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)


def test_a_failed_compilation_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "build", lambda *_: {BUILT: "its process ended by SIGKILL"})
    verdict = verify.verify((BuiltTarget(GPU, "cpu"),), "bfloat16")
    assert verdict == verdicts.Verdict(False, "not checked: its process ended by SIGKILL")
    assert verdicts.known(GPU, "bfloat16") is None


def test_a_process_killed_by_the_system_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(SubprocessWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            if call.func is worker.check_small:
                assert self._process is not None
                self._process.kill()
            return super().ask(functools.partial(int), seconds)

    monkeypatch.setattr(verify, "SubprocessWorker", Killed)
    verdict = verify.verify((TARGET,), "bfloat16")
    assert "not checked: its process ended by SIGKILL" in verdict.reason
    assert verdicts.known(GPU, "bfloat16") is None


def test_a_verdict_that_cannot_be_recorded_holds_for_the_process(
    folder: Path, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "verified").write_text("a file instead of the folder")
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    device = torch.device("cuda", 7)
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            assert dispatch.device_unsupported_reason(device, dtype) is None
        monkeypatch.setattr(verify, "SubprocessWorker", None)
