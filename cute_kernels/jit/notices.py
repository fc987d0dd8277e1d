"""What a process says before it makes a call wait: one line, to the logger "cutefce".

On a terminal, a progress bar follows it.

Its level is that of warnings: without any configuration of logging, Python writes the line to
stderr, and `logging.getLogger("cutefce").setLevel(logging.ERROR)` silences it.  Python's warnings
are for what users can change.
"""

import logging
import sys
import threading
from types import TracebackType
from typing import Any

NOTICE_SECONDS = 2
"""Seconds of compiling after which the process says so."""
LOGGER = logging.getLogger("cutefce")


def announce(text: str) -> None:
    """Say what the process is about to do."""
    LOGGER.warning("cutefce: %s", text)


class CompilingNotice:
    """A region in which kernels are compiled; if that takes long, the process says so.

    It says it once, and shows the progress of each region where stderr is a terminal.
    """

    _was_given = False

    def __init__(self, count: int, arch: str) -> None:
        """Take how many kernels there are, and their architecture."""
        kernels = f"{count} {'kernel' if count == 1 else 'kernels'} for {arch}"
        self._text = (
            f"compiles {kernels}; later processes load them, and `cutefce compile` makes all of "
            "them ahead"
        )
        self._bar = _bar(f"compiling {kernels}", count)
        self._timer = threading.Timer(NOTICE_SECONDS, self._give)
        self._timer.daemon = True

    def advance(self) -> None:
        """Count a kernel as compiled; any thread may call it."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def _give(self) -> None:
        if not self._was_given:
            type(self)._was_given = True
            announce(self._text)
        if self._bar is not None and LOGGER.isEnabledFor(logging.WARNING):
            self._bar.start()

    def __enter__(self) -> "CompilingNotice":
        """Begin."""
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        """Say nothing from now on."""
        self._timer.cancel()
        self._timer.join()  # it may be about to start the bar
        if self._bar is not None:
            self._bar.stop()


def _bar(text: str, count: int) -> Any:
    """Return a progress bar of rich on a terminal, which nothing has started; else None."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    bar.add_task(text, total=count)
    return bar
