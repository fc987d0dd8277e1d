"""What a process says before it makes a call wait: one line, to the logger "cutefce".

On a terminal, a progress bar follows it.

Its level is that of warnings: without any configuration of logging, Python writes the line to
stderr, and `logging.getLogger("cutefce").setLevel(logging.ERROR)` silences it.  Python's warnings
are for what users can change.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

NOTICE_SECONDS = 2
"""Seconds of compiling after which the process says so."""
LOGGER = logging.getLogger("cutefce")


def announce(text: str) -> None:
    """Say what the process is about to do."""
    LOGGER.warning("cutefce: %s", text)


_was_given = False


@contextlib.contextmanager
def compiling(count: int, arch: str) -> Iterator[Callable[[], None]]:
    """Say that `count` kernels are compiled here, if that takes long; yield what counts one.

    A process says it once, and shows the progress of each region where stderr is a terminal.  Any
    thread may count a kernel as compiled.
    """
    kernels = f"{count} {'kernel' if count == 1 else 'kernels'} for {arch}"
    bar = _bar(f"compiling {kernels}", count)

    def give() -> None:
        global _was_given
        if not _was_given:
            _was_given = True
            announce(
                f"compiles {kernels}; later processes load them, and `cutefce compile` makes all "
                "of them ahead"
            )
        if bar is not None and LOGGER.isEnabledFor(logging.WARNING):
            bar.start()

    timer = threading.Timer(NOTICE_SECONDS, give)
    timer.daemon = True
    timer.start()
    try:
        yield (lambda: None) if bar is None else lambda: bar.advance(bar.task_ids[0])
    finally:
        timer.cancel()
        timer.join()  # it may be about to start the bar
        if bar is not None:
            bar.stop()


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
