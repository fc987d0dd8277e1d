"""A process that runs calls one after another, each under a time limit.

What a call may do wrong - find no end, crash, take all memory, leave the GPU unusable - ends the
child, not the caller.  Starting one takes seconds, so that one serves many calls; after a failure
the next call gets a new one.
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
from types import TracebackType
from typing import IO, Any, TypeVar

T = TypeVar("T")

START_SECONDS, END_SECONDS = 120, 30
MOST_CHARACTERS = 300
"""Of a reason."""
OUT_OF_MEMORY = (
    "out of memory",
    "OUT_OF_MEMORY",
    "MemoryError",
    "MemoryAllocation",
    "can't allocate memory",
    "ALLOC_FAILED",
    "ended by SIGKILL",
)
"""What errors say that are for lack of memory, the last one where the system ends a process."""


class ChildError(Exception):
    """A call found no end, ended its process, or raised; the text says which."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it only lacked memory."""
        return any(text in str(self) for text in OUT_OF_MEMORY)


class Child:
    """One process at a time, started at the first call."""

    _process: "subprocess.Popen[bytes] | None" = None
    _connection: "Connection[Any, Any]"
    _log: IO[bytes]
    _open: contextlib.ExitStack

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self.close()

    def ask(self, call: Callable[[], T], seconds: float) -> T:
        """Return what `call`, which can be pickled, returns in the child.

        Raises:
            ChildError: if it does not return within `seconds`.
            RuntimeError: if no child can be started, for which the call is not to blame.
        """
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(pickle.dumps(call))
            if not self._connection.poll(seconds):
                raise ChildError(f"no answer within {seconds:g} s")
            error, result = self._connection.recv()
            if error is not None:
                raise ChildError(error)
            answer: T = result
            return answer
        except (EOFError, OSError) as gone:
            raise ChildError(self._last_words()) from gone
        finally:
            if sys.exc_info()[0] is not None:
                self.close()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            # one that a driver does not let go is left behind
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._open.close()
            self._process = None

    def _start(self) -> None:
        self._open = contextlib.ExitStack()
        ours, theirs = Pipe()
        self._connection = self._open.enter_context(ours)
        self._log = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        code = f"from {__name__} import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        try:
            if not self._connection.poll(START_SECONDS):
                raise EOFError
            self._connection.recv()
        except EOFError as gone:
            words = self._last_words()
            self.close()
            raise RuntimeError(f"cutefce: no child process could be started: {words}") from gone

    def _last_words(self) -> str:
        """Return how the process ended, with the last line that it wrote."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "its process does not answer"
        how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f"its process ended by {how}" + (f": {last[:MOST_CHARACTERS]}" if last else "")


def _environment() -> dict[str, str]:
    """Return the environment of a child: it imports what its parent does, and compiles no graph."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}


def serve(descriptor: int) -> None:
    """Run calls until the parent is gone; an answer is (what was raised, what was returned)."""
    if sys.platform == "linux":
        # a kernel without end would outlive a parent that is killed
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    connection: Connection[Any, Any] = Connection(descriptor)
    connection.send("ready")
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        answer: tuple[str | None, object]
        try:
            answer = None, pickle.loads(call)()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS], None
        connection.send(answer)
