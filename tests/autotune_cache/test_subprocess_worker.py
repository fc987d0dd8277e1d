"""The subprocess that runs trials: its failures, time limits and end."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cutefce.cute_kernels.jit import subprocess_worker
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError


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


def is_running(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
