"""The tuner, without a GPU: whatever candidates and processes do, the table stays right."""

import dataclasses
import functools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.autotune_cache import lookup, table_io, verdicts
from cutefce.autotune_cache.table import Rejection
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import candidates, shapes, tuner, verify, worker
from cutefce.autotune_cache.tuning import subprocess_worker as child_module
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError
from cutefce.autotune_cache.tuning.targets.project_exp import ProjectExp
from cutefce.autotune_cache.tuning.tuner import Tuner
from cutefce.commands import tune
from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch import arch_for
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.problem import Problem
from tests.support.fake_tuner import (
    DEVICE,
    HEAD,
    SIZE,
    SIZES,
    STAND_IN,
    Inline,
    job,
    nothing,
    tune_inline,
)
from tests.support.faulty_candidates import Kind, StandIn, config


def test_faults_are_rejected_with_their_reason_and_tuning_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "TRIAL_SECONDS", 15)
    path, kinds = folder / "table.json", tuple(kind for kind in Kind if kind is not Kind.WRONG_SUMS)
    with Child() as child:
        outcome = Tuner(path, HEAD, child, {}).tune(job(kinds), nothing)
    reasons = {
        Kind.HANGS: "no answer within 15 s",
        Kind.CRASHES: "its process ended by SIGSEGV",
        Kind.WRONG_GRADIENTS: "MismatchError: one row: dW is off by 0.0",
        Kind.LEAKS: "can't allocate memory",
    }
    assert outcome.failures.keys() == {config(kind) for kind in reasons}
    held = table_io.read(path)
    for kind, reason in reasons.items():
        rejection = held.rejected[outcome.job.key, config(kind)]
        assert reason in rejection.reason
        assert rejection.everywhere == (kind is not Kind.LEAKS)
    entry = held.entries[outcome.job.key]
    assert entry.verified
    assert entry.config == config(Kind.FAST)
    assert entry.baseline_milliseconds > 100 > entry.milliseconds > 0
    assert entry.product_milliseconds > 0


def test_what_wins_the_first_race_alone_does_not_win(folder: Path) -> None:
    class Powered(Inline):
        def ask(self, call: Any, seconds: float) -> Any:
            answer = super().ask(call, seconds)
            if call.func is worker.race and call.args[-1] > 1:
                return tuple(worker.Timing(2.0, 1.0) for _ in answer)
            return answer

    outcome = Tuner(folder / "table.json", HEAD, Powered(), {}).tune(
        job((Kind.SLOW, Kind.FAST)), nothing
    )
    assert outcome.entry is not None
    assert outcome.entry.config == config(Kind.SLOW)


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a process of its own, which imports nothing anew."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_killed_at_any_time_the_file_is_right(folder: Path) -> None:
    path, chance = folder / "table.json", random.Random(0)
    table, reported, killed = HEAD, set(), 0
    for attempt in range(60):
        ours, theirs = os.pipe()
        vocabularies = range(1 + 1000 * attempt, 1001 + 1000 * attempt)
        note = functools.partial(report, theirs)
        pid = fork(functools.partial(tune_inline, path, vocabularies, note))
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            done = pipe.read(4 * chance.randrange(3))
            time.sleep(chance.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
            done += pipe.read()
        reported |= {int.from_bytes(done[i : i + 4], "little") for i in range(0, len(done), 4)}
        if path.exists():
            table = table_io.read(path)
        assert reported <= {key.vocab for key in table.entries}
        for entry in table.entries.values():
            assert entry.verified
            assert entry.config == config(Kind.FAST)
    assert killed == 60
    assert len(reported) >= 30
    faulty = {kind for kind in Kind if kind not in (Kind.SLOW, Kind.FAST)}
    assert {choice for _, choice in table.rejected} == {config(kind) for kind in faulty}


def report(pipe: int, done: Job) -> None:
    os.write(pipe, done.key.vocab.to_bytes(4, "little"))


def test_two_tuners_at_once_lose_nothing(folder: Path) -> None:
    path = folder / "table.json"
    ranges = [range(100, 130), range(120, 150)]
    pids = [fork(functools.partial(tune_inline, path, some, lambda job: None)) for some in ranges]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert {key.vocab for key in table_io.read(path).entries} == set(range(100, 150))


def test_what_hung_once_is_not_tried_again(folder: Path) -> None:
    asked = []

    class Counting(Inline):
        def ask(self, call: Any, seconds: float) -> Any:
            asked.append(call)
            return super().ask(call, seconds)

    path, kinds = folder / "table.json", (Kind.SLOW, Kind.HANGS, Kind.LEAKS)
    work = Tuner(path, HEAD, Counting(), {})
    work.tune(job(kinds), nothing)

    def tried(kind: Kind) -> int:
        return [call.args[2] for call in asked if call.func is worker.qualify].count(config(kind))

    work.tune(job(kinds, (24, 16, 700)), nothing)
    assert tried(Kind.HANGS) == 1, "whatever the problem"
    assert tried(Kind.LEAKS) == 2, "another problem may need less memory"
    newer = dataclasses.replace(HEAD, versions={"kernels": "4567"})
    again = Tuner(path, newer, Counting(), {}).tune(job(kinds), nothing)
    assert tried(Kind.HANGS) == 2, "other kernels may not hang"
    assert again.entry is not None
    assert again.entry.config == config(Kind.SLOW), "what is left"


def test_what_ends_the_race_of_all_is_found_one_by_one(folder: Path) -> None:
    class Brittle(Inline):
        def ask(self, call: Any, seconds: float) -> Any:
            raced = call.args[2] if call.func is worker.race else ()
            if config(Kind.LEAKS) in raced:
                raise ChildError("out of memory")
            is_right = call.func is worker.qualify and call.args[2] == config(Kind.LEAKS)
            return True if is_right else super().ask(call, seconds)

    path, kinds = folder / "table.json", (Kind.SLOW, Kind.LEAKS, Kind.FAST)
    outcome = Tuner(path, HEAD, Brittle(), {}).tune(job(kinds), nothing)
    assert outcome.failures == {config(Kind.LEAKS): "out of memory"}
    assert outcome.entry is not None
    assert outcome.entry.config == config(Kind.FAST)


def test_a_kernel_that_does_not_compile_is_rejected(folder: Path) -> None:
    broken = spec.ProjectExpSpec("sm_90a", "bfloat16", config(Kind.FAST), sums=True, store=True)

    class Compiled(StandIn):
        def kernels(self, problem: Problem, choice: Any) -> tuple[spec.KernelSpec, ...]:
            return (dataclasses.replace(broken, config=choice),)

    tunable = Compiled(Sm90(), SIZE, "cpu")
    choices = config(Kind.SLOW), config(Kind.FAST)
    todo = Job(tunable, tunable.problem(SIZES, "bfloat16"), choices, 0)
    work = Tuner(folder / "table.json", HEAD, Inline(), {broken: "16 bytes spilled"})
    outcome = work.tune(todo, nothing)
    assert outcome.failures == {config(Kind.FAST): "16 bytes spilled"}
    (rejection,) = table_io.read(folder / "table.json").rejected.values()
    assert rejection == Rejection("16 bytes spilled", everywhere=True)
    assert outcome.entry is not None
    assert outcome.entry.config == config(Kind.SLOW)


def test_compiling_ahead(folder: Path) -> None:
    pytest.importorskip("cutlass")
    good = spec.ScaleAddRowsSpec(
        "sm_90a", "bfloat16", "bfloat16", None, row_scale=True, gather_scale=False
    )
    bad = dataclasses.replace(good, arch="sm_1")
    assert tuner.missing([good, good]) == [good]
    done: list[None] = []
    failed = tuner.build([good, bad], lambda: done.append(None))
    assert len(done) == 2
    assert failed.keys() == {bad}
    assert tuner.missing([good]) == []


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or arch_for(torch.cuda.get_device_capability()) is None,
    reason="needs a GPU that has kernels",
)
def test_on_a_gpu(folder: Path) -> None:
    every, name = tune._this_gpu()
    path = folder / "table.json"
    for tunable in every:
        todo = candidates.plan(tunable, tunable.problem((1000, 512, 8000), "bfloat16"))
        todo = dataclasses.replace(todo, choices=todo.choices[:3])
        assert not tuner.build(tuner.missing(todo.kernels()), nothing)
        with Child() as child:
            outcome = Tuner(path, tuner.head_for(tunable, name), child, {}).tune(todo, nothing)
        assert not outcome.failures
        assert outcome.entry is not None
        assert outcome.entry.config in todo.choices
        assert table_io.read(path).entries[todo.key] == outcome.entry


def test_what_the_cost_model_leaves() -> None:
    tunable, arch = ProjectExp(Sm90(), SIZE), Sm90()
    for sizes in [sizes for some in shapes.NAMED.values() for sizes in some]:
        todo = candidates.plan(tunable, tunable.problem(sizes, "bfloat16"))
        assert todo.choices[0] == arch.default(sizes[0])
        assert len(set(todo.choices)) == len(todo.choices) == 1 + candidates.CANDIDATES
        everything = candidates.plan(tunable, todo.problem, everything=True)
        assert everything.pruned == 0
        assert set(todo.choices) < set(everything.choices)
        assert len(everything.choices) == len(todo.choices) + todo.pruned


def test_candidates_are_legal_and_contain_the_defaults() -> None:
    arch = Sm90()
    every = arch.search_space()
    assert len(set(every)) == len(every) > 100
    assert all(arch.is_legal(config) for config in every)
    assert set(arch.prebuilt_configs()) <= set(every)


def test_shapes_by_name_and_by_hand() -> None:
    assert (8192, 4096, 131072) in shapes.parse("paper")
    assert shapes.parse("5000x2304x256000") == shapes.parse("5000×2304×256000")
    for wrong in ("gpt", "1x2", "0x8x8", "8x12x8", "8x8x-8"):
        with pytest.raises(ValueError, match="expected one of few-tokens, "):
            shapes.parse(wrong)


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what runs a command as if the stand-ins were this GPU's kernels."""
    monkeypatch.setattr(tune, "_this_gpu", lambda: ((STAND_IN,), DEVICE))
    monkeypatch.setattr(tune, "Child", Inline)
    verdict = verdicts.Verdict(True)
    monkeypatch.setattr(verify, "verify_once", lambda *_: verdict)
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_the_command(command: Any, folder: Path) -> None:
    path = folder / "tuning" / file_name(DEVICE)
    one, two = "24x16x300", "24x16x700"
    dry = command("tune", "--shapes", one, "--dry-run")
    assert dry.exit_code == 0
    assert "1 of 1 problems to tune, in 2 trials" in dry.output
    assert not path.exists()
    assert command("tune", "--shapes", one, "--budget-minutes", "0").output.count("are left") == 1
    first = command("tune", "--shapes", one)
    assert first.exit_code == 0, first.output
    assert "24 × 16 × 300" in first.output
    assert "100.0%" in first.output, "the gain"
    second = command("tune", "--shapes", one, "--shapes", two, "--resume")
    assert "1 of 2 problems to tune" in second.output
    assert second.output.count("100.0%") == 2, "the table has both"
    assert len(table_io.read(path).entries) == 2
    assert lookup.tables(Sm90(), DEVICE, SIZE) == (table_io.read(path),)
    assert "expected one of" in command("tune", "--dtype", "float64").output
    assert "expected one of few-tokens" in command("tune", "--shapes", "gpt").output


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("tune", "verify"):
        result = CliRunner().invoke(main, [name])
        assert result.exit_code == 1
        assert "no GPU here that has kernels" in result.output


def test_after_a_failure_a_new_child_serves() -> None:
    with Child() as child:
        pid = child.ask(os.getpid, 10)
        assert child.ask(os.getpid, 10) == pid
        with pytest.raises(ChildError, match="ZeroDivisionError"):
            child.ask(functools.partial(divmod, 1, 0), 10)
        other = child.ask(os.getpid, 10)
        assert other != pid
        with pytest.raises(ChildError, match="exit status 3"):
            child.ask(functools.partial(os._exit, 3), 10)
    assert not is_running(other)


def test_a_process_that_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "END_SECONDS", 0.1)
    with Child() as child:
        pid = child.ask(os.getpid, 10)
        assert child._process is not None
        monkeypatch.setattr(child._process, "kill", lambda: None)
        with pytest.raises(ChildError, match="no answer"):
            child.ask(functools.partial(time.sleep, 3600), 0.1)
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_what_hangs_does_not_outlive_the_tuner() -> None:
    code = (
        "import functools, os, time\n"
        "from cutefce.autotune_cache.tuning.subprocess_worker import Child\n"
        "child = Child()\n"
        "print(child.ask(os.getpid, 10), flush=True)\n"
        "child.ask(functools.partial(time.sleep, 3600), 3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(0.5)  # let the call begin
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
