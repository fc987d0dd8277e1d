"""What a process says before it makes a call wait: one line, to the logger "cutefce".

Its level is that of warnings: without any configuration of logging, Python writes the line to
stderr, and `logging.getLogger("cutefce").setLevel(logging.ERROR)` silences it.  Python's warnings
are for what users can change.
"""

import logging

LOGGER = logging.getLogger("cutefce")


def announce(text: str) -> None:
    """Say what the process is about to do."""
    LOGGER.warning("cutefce: %s", text)
