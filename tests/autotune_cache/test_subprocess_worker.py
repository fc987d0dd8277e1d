"""The subprocess that runs trials: its failures, time limits and end."""

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cutefce.cute_kernels.jit import build, subprocess_worker
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import SelectRowsSpec


@pytest.mark.slow
def test_one_subprocess_serves_until_a_call_takes_too_long() -> None:
    with SubprocessWorker() as process:
        pid = process.ask(os.getpid, 10)
        assert process.ask(os.getpid, 10) == pid
        with pytest.raises(WorkerError, match="no answer within 0"):
            process.ask(functools.partial(time.sleep, 3600), 0.1)
        assert not is_running(pid)


@pytest.mark.slow
def test_after_a_failure_a_new_subprocess_serves() -> None:
    with SubprocessWorker() as process:
        pid = process.ask(os.getpid, 10)
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            process.ask(functools.partial(divmod, 1, 0), 10)
        other = process.ask(os.getpid, 10)
        assert other != pid
        with pytest.raises(WorkerError, match="exit status 3"):
            process.ask(functools.partial(os._exit, 3), 10)
    assert not is_running(other)


@pytest.mark.slow
def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_worker, "END_SECONDS", 0.1)
    with SubprocessWorker() as process:
        pid = process.ask(os.getpid, 10)
        assert process._process is not None
        monkeypatch.setattr(process._process, "kill", lambda: None)
        with pytest.raises(WorkerError, match="no answer"):
            process.ask(functools.partial(time.sleep, 3600), 0.1)
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_hanging_call_does_not_outlive_the_tuner() -> None:
    code = (
        "import functools, os, time\n"
        "from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker\n"
        "process = SubprocessWorker()\n"
        "print(process.ask(os.getpid, 10), flush=True)\n"
        "process.ask(functools.partial(time.sleep, 3600), 3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)  # let the call begin
    parent.kill()
    parent.communicate()
    end = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(pid)


@pytest.mark.parametrize("fails", ["Pipe", "tempfile.TemporaryFile", "subprocess.Popen"])
def test_without_resources_no_subprocess_starts(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(f"{subprocess_worker.__name__}.{fails}", refuse)
    with SubprocessWorker() as process:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"could be started: .*temporarily"):
                process.ask(os.getpid, 10)


@pytest.mark.slow
def test_signals_to_the_parents_group_do_not_reach_it() -> None:
    with SubprocessWorker() as process:
        assert process.ask(os.getpgrp, 10) != os.getpgrp()


@pytest.mark.slow
def test_an_interrupt_stops_the_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ThreadPoolExecutor):
        def map(self, *arguments: Any, **_: Any) -> Any:
            super().map(*arguments)
            end = time.monotonic() + 60
            while not list(tmp_path.iterdir()):
                assert time.monotonic() < end
                time.sleep(0.05)
            raise KeyboardInterrupt

    monkeypatch.setattr(build, "ThreadPoolExecutor", Interrupted)
    kernels = [SelectRowsSpec(arch) for arch in ("sm_90a", "sm_100a", "sm_103a")]
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        build.build(kernels, functools.partial(never_ends, tmp_path))
    assert time.monotonic() - begin < 60


def never_ends(folder: Path, kernel: KernelSpec) -> None:
    (folder / kernel.arch).touch()
    time.sleep(3600)


def is_running(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
