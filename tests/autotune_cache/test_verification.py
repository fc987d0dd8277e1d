"""Verification before the first launch, and tuning at the first call for users who ask for it."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutefce.autotune_cache import ahead, lookup, table, table_io, verdicts
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import first_use, runner, targets, tuner, verify, worker
from cutefce.autotune_cache.tuning.runner import Runner, with_tuned
from cutefce.cute_kernels import cache_files, process_cache, spec
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.parts import FORWARD, SAMPLES, STEP, parts_of
from cutefce.cute_kernels.variant import PLAIN
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.primitives import dispatch
from tests.support.fake_tuner import RUNNER, TARGET, InlineWorker, InProcess, tune_inline
from tests.support.faulty_candidates import FaultyRunner, Kind, config
from tests.support.tables import DSL, ENTRY, GPU, KERNELS, KEY, PROBLEM, TABLE
from tests.support.tiers import rest_slow

PASSED = verdicts.Verdict(True)
H100 = Gpu(Sm90(), "NVIDIA H100 80GB HBM3", 132)
H20 = Gpu(Sm90(), "NVIDIA H20", 78)
GH200 = Gpu(Sm90(), "NVIDIA GH200 480GB", 132)


def known(dtype: str = "bfloat16", of: Runner = RUNNER, gpu: Gpu = GPU) -> verdicts.Verdict | None:
    """Return the verdict on the defaults `of` a runner, and on what tables choose for `gpu`."""
    checks = verify.configurations(of, dtype, lookup.tables(gpu))
    return verdicts.known(gpu, dtype, uses_of(checks))


def uses_of(checks: list[verify.Check]) -> set[str]:
    """Return what checks prove together."""
    return {use for check in checks for use in check.uses()}


def known_really(dtype: str = "bfloat16") -> verdicts.Verdict | None:
    """Return that on the defaults of the architecture."""
    return known(dtype, Runner(GPU, "cpu"))


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
    monkeypatch.setattr(dispatch, "_missing_reason", lambda: None)
    process_cache.reset()
    yield fake
    process_cache.reset()


DEVICE, SIZES = torch.device("cuda", 7), (8192, 4096, 131072)


def reason(part: str = FORWARD, sizes: tuple[int, int, int] = SIZES) -> str:
    """Return why a part of bfloat16 calls must not launch its kernels, "None" if it may."""
    return str(dispatch.unproven_reason(DEVICE, "bfloat16", sizes, part))


def defaults_are(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the architecture's default be a fake one."""
    monkeypatch.setattr(runner, "Runner", lambda gpu, _: DefaultRunner(gpu, "cpu", kind))
    monkeypatch.setattr(Sm90, "default", lambda *_: config(kind))


@dataclass(frozen=True)
class DefaultRunner(FaultyRunner):
    """Has one default, of `kind`."""

    kind: Kind = Kind.SLOW

    def base(self) -> KernelConfigs:
        return KernelConfigs(config(self.kind), None, None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[verify.Check]:
    """Return a list of the checks that subprocesses would run, of which all pass."""
    checks: list[verify.Check] = []

    def all_pass(some: list[verify.Check], _: Any) -> Iterator[tuple[verify.Check, None]]:
        for check in some:
            checks.append(check)
            yield check, None

    monkeypatch.setattr(verify, "run_checks", all_pass)
    monkeypatch.setattr(build, "build", lambda *_: {})
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
    assert said in reason() and said in reason(STEP, (20, 16, 300))
    assert said in str(dispatch.device_unsupported_reason(DEVICE, torch.bfloat16))
    assert dispatch.device_unsupported_reason(DEVICE, torch.float16) is None


def test_a_call_has_what_it_launches_checked_and_nothing_else(
    folder: Path,
    fake_gpu: FakeGpu,
    asked: list[verify.Check],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    few, many = (20, 4096, 131072), SIZES
    expected: list[Any] = []
    for part, sizes in ((FORWARD, many), (FORWARD, few), (STEP, many), (SAMPLES, many)):
        configs = GPU.default_configs(*sizes[:2])
        expected.append((parts_of(part), configs))
        if part == STEP:
            wide = with_tuned(configs, "grad_hidden", configs.grad_hidden)
            expected.append((parts_of(part), wide))
        for again in (False, True):
            if again:  # in another process
                process_cache.reset()
            assert reason(part, sizes) == "None"
            assert [(check.parts, check.configs) for check in asked] == expected
    of_step = {kernel for check in asked[2:4] for kernel in check.kernels()}
    assert of_step == set(kernel_set(GPU.arch, "bfloat16", configs).of_part(STEP))
    assert len(of_step) < 40 < len(ahead.all_kernels(GPU.arch))
    for other in (H100, H20):  # the same code, of the same configurations
        same = dataclasses.replace(GPU.default_configs(*few[:2]))
        assert verdicts.known(other, "bfloat16", verdicts.uses(same, (FORWARD,))) == PASSED


def test_options_have_their_own_configuration_checked(
    folder: Path,
    fake_gpu: FakeGpu,
    asked: list[verify.Check],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few tokens with options have no operands swapped."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    problem = dataclasses.replace(PROBLEM, tokens=100, grad_hidden=False, grad_weight=False)
    for options in (LossOptions(), LossOptions(softcap=30.0)):
        assert reason(FORWARD, (100, 4096, 131072)) == "None"
        given = DEVICE, options, TensorOptions(), False
        assert dispatch.options_unsupported_reason(problem, *given) is None
    swapped, plain = (check.candidate for check in asked)
    assert isinstance(swapped, GemmConfig) and isinstance(plain, GemmConfig)
    assert (swapped.swaps, plain.swaps) == (True, False)


@pytest.mark.parametrize(
    "gpu", rest_slow({gpu.name: gpu for gpu in (H20, GPU, H100, GH200)}, default=2)
)
def test_a_shipped_table_proves_all_defaults_of_its_architecture(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other cards execute the same code: theirs are among those that tuning has verified."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    tune_inline(folder / file_name(GPU), range(100, 101), lambda job: None)
    assert known_really() == PASSED
    assert known_really("float16") is None, "the table has no entry of this dtype"
    for tokens, hidden in itertools.product((1, 64, 65, 300, 384, 385, 4096, 32768), HIDDEN):
        configs = gpu.default_configs(tokens, hidden)
        options = gpu.arch.config_with_options(configs.project_exp, tokens)
        for project_exp in (configs.project_exp, options):
            used = dataclasses.replace(configs, project_exp=project_exp)
            assert verdicts.known(gpu, "bfloat16", verdicts.uses(used)) == PASSED
            assert verdicts.known(gpu, "float16", verdicts.uses(used)) is None
    blackwell = Gpu(Sm100(), "NVIDIA B200", 148)
    needed = verdicts.uses(blackwell.default_configs(8192, 4096))
    assert verdicts.known(blackwell, "bfloat16", needed) is None


HIDDEN = 512, 1152, 2048, 2304, 4096, 7168, 16384


OTHER_KEY = dataclasses.replace(KEY, vocab=32000)
OTHER_CONFIG = config(Kind.FAST)
FOREIGN: dict[str, dict[str, Any]] = {
    "other kernels": {"kernels": "0123"},
    "another compiler": {"dsl": "0.1"},
}
"""What an entry is of whose choice is used and whose proof is not."""
foreign_builds = pytest.mark.parametrize("changes", rest_slow(FOREIGN))


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
    assert known_really() == (PASSED if is_proof else None)
    assert known_really("float16") is None


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
    assert known_really() is None
    assert known_really("float16") is None
    proof = dataclasses.replace(foreign, dsl=DSL, kernels=KERNELS)
    table_io.update(shipped, dataclasses.replace(new, entries={KEY: proof}))
    process_cache.reset()
    assert known_really() == PASSED, "by an entry of another key"


@foreign_builds
def test_a_recorded_verdict_covers_the_configurations_that_it_checked(
    changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "run_checks", lambda *_: iter(()))
    user = lookup.user_folder() / file_name(GPU)
    foreign = dataclasses.replace(ENTRY, config=OTHER_CONFIG, **changes)
    table_io.write(user, dataclasses.replace(TABLE, entries={OTHER_KEY: foreign}, rejected={}))
    assert known() is None
    assert verify.verify(RUNNER, "bfloat16").passed
    assert known() == PASSED
    another = dataclasses.replace(foreign, config=dataclasses.replace(OTHER_CONFIG, stages=5))
    table_io.update(user, dataclasses.replace(TABLE, entries={KEY: another}, rejected={}))
    process_cache.reset()
    assert known() is None, "this one was not checked"
    table_io.update(user, dataclasses.replace(TABLE, entries={KEY: ENTRY}, rejected={}))
    process_cache.reset()
    assert known() == PASSED


@pytest.mark.slow
@foreign_builds
def test_a_tuned_configuration_that_fails_is_rejected_alone(
    changes: dict[str, Any], folder: Path, in_process: None, monkeypatch: pytest.MonkeyPatch
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
    assert known() is None
    with pytest.warns(UserWarning, match="is rejected: .*sum of the other exponentials"):
        assert verify.verify(RUNNER, "bfloat16").passed
    assert known() == PASSED
    served = [entry.config for found in lookup.tables(GPU) for entry in found.entries.values()]
    assert served == [right, right], "from the user's table and the shipped one"
    assert "sum of the other exponentials" in table_io.read(user).rejected[KEY.rejects(wrong)]


@pytest.mark.parametrize("part", [FORWARD, STEP, SAMPLES])
def test_a_call_whose_default_fails_rejects_no_tuned_configuration(
    part: str, folder: Path, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a wrong default every tuned configuration seems to be wrong."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    monkeypatch.setattr(build, "build", lambda *_: {})
    user = lookup.user_folder() / file_name(GPU)
    others = Sm90().search_space()[:2]
    entries = {
        dataclasses.replace(KEY, kernel=kernel): dataclasses.replace(
            ENTRY, config=other, kernels="0123"
        )
        for kernel, other in zip(("project_exp", "grad_weight"), others, strict=True)
    }
    table_io.write(user, dataclasses.replace(TABLE, entries=entries, rejected={}))
    process_cache.reset()

    def all_fail(checks: list[verify.Check], _: Any) -> Iterator[tuple[verify.Check, str]]:
        for check in checks:
            yield check, "wrong"

    monkeypatch.setattr(verify, "run_checks", all_fail)
    assert "failed on NVIDIA Test 9000" in reason(part)
    assert not table_io.read(user).rejected


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
    needed = verdicts.uses(GPU.default_configs(8192, 4096))
    assert verdicts.known(GPU, "bfloat16", needed) == PASSED
    asked: list[Any] = []

    def all_fail(checks: list[verify.Check], advance: Any) -> Iterator[tuple[verify.Check, str]]:
        for check in checks:
            asked.append(check.candidate)
            yield check, "wrong"

    monkeypatch.setattr(verify, "run_checks", all_fail)
    assert not verify.verify(RUNNER, "bfloat16").passed
    assert asked == [config(Kind.SLOW)], "the default first, and nothing after its failure"
    assert not table_io.read(user).rejected
    verdict = known()
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
    assert known() is None
    rejected = {KEY.rejects(wrong.config): "wrong"}
    table_io.update(user, dataclasses.replace(tuned, entries={}, rejected=rejected))
    checks = verify.configurations(RUNNER, "bfloat16", ())
    verdicts.record(GPU, "bfloat16", PASSED, uses_of(checks))
    monkeypatch.setattr(verify, "SubprocessWorker", None)
    assert verify.verify_once(RUNNER, "bfloat16").passed
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
    verdicts.record(GPU, "bfloat16", PASSED, set())
    fake_gpu.capturing, fake_gpu.ranks = state.capturing, state.ranks
    problem = RUNNER.problem((20, 16, 300), "bfloat16")
    expected = config(Kind.FAST) if tuned else Sm90().default(20)
    for tokens in (20, 23):  # the second is in the table
        problem = dataclasses.replace(problem, tokens=tokens)
        _, kernels, _ = dispatch.kernels_for(torch.device("cuda", 7), problem, PLAIN)
        assert kernels.row_sums.config == expected
        monkeypatch.setattr(first_use, "SubprocessWorker", None)
        process_cache.reset()


def test_what_other_processes_wrote_during_tuning_is_verified(
    folder: Path,
    fake_gpu: FakeGpu,
    asked: list[verify.Check],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tuning reads the tables again, which processes with other kernels may have changed."""
    monkeypatch.setenv(lookup.AUTOTUNE_VARIABLE, "1")
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    problem = RUNNER.problem((20, 16, 300), "bfloat16")
    another = dataclasses.replace(OTHER_CONFIG, stages=5)
    foreign = dataclasses.replace(ENTRY, config=another, kernels="0123")
    key = table.key_of("project_exp", problem)

    class Interrupted(InlineWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            path = lookup.user_folder() / file_name(GPU)
            table_io.update(path, dataclasses.replace(TABLE, entries={key: foreign}))
            raise WorkerError("out of memory")

    monkeypatch.setattr(first_use, "SubprocessWorker", Interrupted)
    with pytest.warns(UserWarning, match="was not tuned"):
        _, kernels, _ = dispatch.kernels_for(DEVICE, problem, PLAIN)
    assert kernels.row_sums.config == another
    assert another in [check.candidate for check in asked]


def test_first_use_without_a_cache_folder_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, "relative")
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    process_cache.reset()
    problem = RUNNER.problem((20, 16, 300), "bfloat16")
    with pytest.warns(UserWarning, match="was not tuned: no cache folder"):
        first_use.tune_on_first_use(GPU, "cpu", problem)
    process_cache.reset()


def test_a_check_without_a_subprocess_is_no_verdict(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    verdict = verify.verify(RUNNER, "bfloat16")
    assert not verdict.passed
    assert "not checked" in verdict.reason
    assert known() is None


BUILT = spec.TargetLogitSpec("sm_90a", "bfloat16")


class BuiltRunner(FaultyRunner):
    """Needs one kernel to be compiled."""

    def kernels(self, *_: Any) -> list[spec.KernelSpec]:
        return [BUILT]


def test_kernels_that_cannot_be_stored_are_compiled_outside_the_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    class Asked(SubprocessWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            asked.append((call.func.__name__, seconds))

    monkeypatch.setattr(build, "build", lambda *_: {})
    monkeypatch.setattr(verify, "SubprocessWorker", Asked)
    assert verify.verify(BuiltRunner(GPU, "cpu"), "bfloat16").passed
    assert asked[:3] == [
        ("load", build.BUILD_SECONDS),
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
    monkeypatch.setattr(build, "missing", list)
    monkeypatch.setattr(build, "build", lambda *_: {OTHER_CONFIG: "16 bytes spilled"})
    ran: list[Any] = []

    def all_pass(checks: list[verify.Check], advance: Any) -> Iterator[tuple[verify.Check, None]]:
        for check in checks:
            ran.append(check.candidate)
            yield check, None

    monkeypatch.setattr(verify, "run_checks", all_pass)
    with pytest.warns(UserWarning, match="is rejected: 16 bytes spilled"):
        assert verify.verify(RUNNER, "bfloat16").passed
    assert ran == [config(Kind.SLOW)]
    assert table_io.read(user).rejected[KEY.rejects(OTHER_CONFIG)] == "16 bytes spilled"
    assert lookup.entry_for("project_exp", PROBLEM, GPU) is None
    assert known() == PASSED


def test_a_failed_compilation_is_no_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda *_: {BUILT: "its process ended by SIGKILL"})
    verdict = verify.verify(BuiltRunner(GPU, "cpu"), "bfloat16")
    assert verdict == verdicts.Verdict(False, "not checked: its process ended by SIGKILL")
    assert known() is None


class Killed(SubprocessWorker):
    """Has a process that the system ends during the first check."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func is worker.check_small:
            assert self._process is not None
            self._process.kill()
        return super().ask(functools.partial(int), seconds)


class SaidToBeKilled(InProcess):
    """Answers the first check as if it were."""

    def ask(self, call: Any, seconds: float) -> Any:
        if call.func is worker.check_small:
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


@pytest.mark.slow
def test_a_verdict_that_cannot_be_recorded_holds_for_the_process(
    folder: Path, fake_gpu: FakeGpu, in_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "verified").write_text("a file instead of the folder")
    defaults_are(Kind.SLOW, monkeypatch)
    for _ in range(2):
        assert reason() == "None"
        monkeypatch.setattr(verify, "SubprocessWorker", None)
