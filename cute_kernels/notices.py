"""What a process says before it makes a call wait: one line, to the logger "cutefce".

Its level is that of warnings: without any configuration of logging, Python writes the line to
stderr, and `logging.getLogger("cutefce").setLevel(logging.ERROR)` silences it.  Python's warnings
are for what users can change.
"""

import logging
import threading
from types import TracebackType

NOTICE_SECONDS = 2
"""Seconds of compiling after which the process says so."""
LOGGER = logging.getLogger("cutefce")


def announce(text: str) -> None:
    """Say what the process is about to do."""
    LOGGER.warning("cutefce: %s", text)


class CompilingNotice:
    """A region in which kernels are compiled; if that takes long, the process says so, once."""

    _was_given = False

    def __init__(self, count: int, arch: str) -> None:
        """Take how many kernels there are, and their architecture."""
        text = (
            f"compiles {count} {'kernel' if count == 1 else 'kernels'} for {arch}; later processes "
            "load them, and `cutefce compile` makes all of them ahead"
        )
        self._timer = threading.Timer(NOTICE_SECONDS, self._give, (text,))
        self._timer.daemon = True

    @classmethod
    def _give(cls, text: str) -> None:
        if not cls._was_given:
            cls._was_given = True
            announce(text)

    def __enter__(self) -> None:
        """Begin."""
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        """Say nothing from now on."""
        self._timer.cancel()
