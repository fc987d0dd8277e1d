"""A subprocess that runs calls one after another, each under a time limit.

A call that hangs, crashes, exhausts memory or leaves the GPU unusable ends the subprocess and not
its parent.  One subprocess serves many calls, because starting one takes seconds; after a failure
the next call starts another.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, Any, TypeVar

T = TypeVar("T")

START_SECONDS, END_SECONDS = 120, 30
"""Time limits of starting a subprocess and of ending one."""
MAX_REASON_CHARACTERS = 300
OUT_OF_MEMORY = (
    "out of memory",
    "OUT_OF_MEMORY",
    "MemoryError",
    "MemoryAllocation",
    "can't allocate memory",
    "ALLOC_FAILED",
    "ended by SIGKILL",
)
"""Parts of error messages that mean too little memory; the last one is Linux's OOM killer."""
ENDED_FROM_OUTSIDE = tuple(
    f"ended by {name}" for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR", "SIGXCPU")
)
"""Those that mean a signal of a user or a scheduler, which a job may get and go on."""


class WorkerError(RuntimeError):
    """A call ran out of time, ended its process, or raised; the message says which."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the cause was too little memory."""
        return any(text in str(self) for text in OUT_OF_MEMORY)

    @property
    def is_of_the_call(self) -> bool:
        """Whether the call itself failed, and would again."""
        return not self.is_out_of_memory and not any(x in str(self) for x in ENDED_FROM_OUTSIDE)


class SubprocessWorker:
    """Runs calls in one subprocess at a time, which the first call starts."""

    def __init__(self, *, has_torch: bool = True) -> None:
        """Let calls import torch only if `has_torch`: importing it takes seconds."""
        self._has_torch = has_torch

    _process: "subprocess.Popen[bytes] | None" = None
    _connection: "Connection[Any, Any]"
    _log: IO[bytes]
    _open: contextlib.ExitStack

    def __enter__(self) -> "SubprocessWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, call: Callable[[], T], seconds: float) -> T:
        """Return the result of `call`, which must be picklable, in the subprocess.

        Raises:
            WorkerError: if it fails or does not return within `seconds`.
            RuntimeError: if no subprocess can be started.
        """
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(pickle.dumps(call))
            if not self._connection.poll(seconds):
                raise WorkerError(f"no answer within {seconds:g} s")
            error, result = self._connection.recv()
            if error is not None:
                raise WorkerError(error)
            answer: T = result
            return answer
        except (EOFError, OSError) as ended:
            raise WorkerError(self._exit_reason()) from ended
        finally:
            if sys.exc_info()[0] is not None:
                self.close()

    def kill(self) -> None:
        """Kill the subprocess, if there is one; a call of another thread fails with WorkerError."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Kill the subprocess, even in the middle of a call, and forget it."""
        if self._process is not None:
            self._process.kill()
            # the driver may keep a process alive; leave that one behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._open.close()
            self._process = None

    def _start(self) -> None:
        """Start the process; signals of a terminal to its parent's group do not reach it."""
        try:
            with contextlib.ExitStack() as opened:
                self._connection, child_end = Pipe()
                opened.enter_context(self._connection)
                with child_end:
                    self._log = opened.enter_context(tempfile.TemporaryFile())
                    code = f"from {__name__} import serve; serve({child_end.fileno()})"
                    if not self._has_torch:
                        code = f"import sys; sys.modules['torch'] = None; {code}"
                    self._process = subprocess.Popen(
                        [sys.executable, "-c", code],
                        pass_fds=[child_end.fileno()],
                        env=_environment(),
                        stdin=subprocess.DEVNULL,
                        stdout=self._log,
                        stderr=self._log,
                        start_new_session=True,
                    )
                self._open = opened.pop_all()
            SubprocessWorker.ask(self, int, START_SECONDS)  # it has imported what it needs
        except (OSError, WorkerError) as error:
            raise RuntimeError(f"cutefce: no subprocess could be started: {error}") from error

    def _exit_reason(self) -> str:
        """Return how the process ended, with the last line of its output."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process does not answer"
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended by {how}" + (f": {last[:MAX_REASON_CHARACTERS]}" if last else "")


def _environment() -> dict[str, str]:
    """Return the subprocess's environment: the parent's import path, and no torch.compile."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}


def serve(descriptor: int) -> None:
    """Run calls until the parent closes the pipe; answer each with (error message, result)."""
    if sys.platform == "linux":
        # otherwise a hanging kernel outlives a killed parent
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    connection: Connection[Any, Any] = Connection(descriptor)
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        answer: tuple[str | None, object]
        try:
            answer = None, pickle.loads(call)()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS], None
        connection.send(answer)
