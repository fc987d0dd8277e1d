"""What a process says before it makes a call wait: one line, to the logger "cutefce".

Its level is that of warnings: without any configuration of logging, Python writes the line to
stderr, and `logging.getLogger("cutefce").setLevel(logging.ERROR)` silences it.  Python's warnings
are for what users can change.
"""

import logging

LOGGER = logging.getLogger("cutefce")

_announced: set[str] = set()


def announce_once(text: str) -> None:
    """Say what the process is about to do, unless it has said so."""
    if text not in _announced:
        LOGGER.warning("cutefce: %s", text)
        _announced.add(text)
