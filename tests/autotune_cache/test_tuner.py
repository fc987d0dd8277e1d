"""The tuner, without a GPU: no fault of a candidate or a process corrupts the table."""

import dataclasses
import functools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cutefce.autotune_cache import tables
from cutefce.autotune_cache.tuning import shapes, tuner, verify
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.tuning.tuner import Job
from cutefce.autotune_cache.verdicts import STEP, parts_of
from cutefce.commands.common import this_gpu
from cutefce.cute_kernels.arch import arch_for
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from tests.support.fake_tuner import HEADER, job, tune_inline
from tests.support.faulty_candidates import Kind, config
from tests.support.tables import OLD, write
from tests.support.tiers import rest_slow

FAULTS = {
    Kind.HANGS: "no answer within 10 s",
    Kind.CRASHES: "its process ended by SIGSEGV",
    Kind.LEAKS: "can't allocate memory",
}


@pytest.mark.slow
def test_a_problem_with_a_fault_has_no_entry_and_tuning_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, todo = folder / "table.json", job()
    with SubprocessWorker() as process:
        for kind, reason in FAULTS.items():
            with monkeypatch.context() as patch, pytest.raises(WorkerError, match=reason):
                patch.setattr(tuner, "TRIAL_SECONDS", 10)
                tuner.tune(job((Kind.SLOW, kind)), process, path, HEADER)
        assert not path.exists()
        entry = tuner.tune(todo, process, path, HEADER)
    assert tables.read(path).entries == {todo.key: entry}
    assert entry.config == config(Kind.FAST)
    assert entry.default_ms > 100 > entry.ms > 0


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked process."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


@pytest.mark.parametrize("attempts", rest_slow([10, 60]))
def test_killed_at_any_time_the_file_is_right(attempts: int, folder: Path) -> None:
    path, chance = folder / "table.json", random.Random(0)
    table, reported, killed = HEADER, set(), 0
    for attempt in range(attempts):
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
            table = tables.read(path)
        assert reported <= {key.vocab for key in table.entries}
        assert {entry.config for entry in table.entries.values()} <= {config(Kind.FAST)}
    assert killed == attempts
    assert len(reported) >= attempts / 2


def report(pipe: int, done: Job) -> None:
    os.write(pipe, done.key.vocab.to_bytes(4, "little"))


def test_two_tuners_at_once_lose_nothing(folder: Path) -> None:
    path = folder / "table.json"
    ranges = [range(100, 130), range(120, 150)]
    pids = [fork(functools.partial(tune_inline, path, some, lambda job: None)) for some in ranges]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    assert {key.vocab for key in tables.read(path).entries} == set(range(100, 150))


def test_entries_that_prove_other_kernels_are_moved_aside(folder: Path) -> None:
    """All entries of a table are those of one build, with which it names its kernels."""
    path = folder / "table.json"
    old = dataclasses.replace(HEADER, versions=OLD)
    write(path, old)
    with pytest.warns(UserWarning, match="aside, to table.old: .*versions: got {'kernels': '0123'"):
        tune_inline(path, range(100, 102), lambda job: None)
    table = tables.read(path)
    assert (table.build, len(table.entries)) == (HEADER.build, 2)
    assert tables.read(path.with_suffix(".old")) == old


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or arch_for(torch.cuda.get_device_capability()) is None,
    reason="needs a GPU that has kernels",
)
def test_on_a_gpu(tmp_path: Path) -> None:
    gpu, device = this_gpu()
    path = tmp_path / "table.json"
    with SubprocessWorker() as process:
        runner = Runner(gpu, device)
        verify.compile_all(runner, "bfloat16", parts_of(STEP))
        for todo in tuner.jobs_of(runner, [(1000, 512, 8000)], "bfloat16"):
            entry = tuner.tune(todo, process, path, tuner.header_for(gpu))
            assert entry.config in todo.candidates
            assert tables.read(path).entries[todo.key] == entry


def test_shapes_by_name_and_by_hand() -> None:
    assert (8192, 4096, 131072) in shapes.parse("paper")
    assert shapes.parse("5000x2304x256000") == shapes.parse("5000×2304×256000")
    for wrong in ("gpt", "1x2", "0x8x8", "8x12x8", "8x8x-8"):
        with pytest.raises(ValueError, match="expected one of few-tokens, "):
            shapes.parse(wrong)
    with pytest.raises(ValueError, match=r"^shapes: got '9{39}, expected one of few-tokens, "):
        shapes.parse("9" * 5000 + "x8x8")
