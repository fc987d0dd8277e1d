"""Caches that live as long as the process, and one reset for all of them.

What they hold depends on tuned tables, environment variables and devices, so tuning, tests and
long-lived processes that change these must clear them.  Loaded kernels are not cleared: CUDA
graphs may hold them.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

MAX_ENTRIES = 1024
"""Entries of one cache; the least recently used go first."""

_clears: list[Callable[[], object]] = []
_warned: set[str] = set()


def process_cache(function: F) -> F:
    """Cache `function` for the process; `reset` clears it."""
    cached = functools.lru_cache(maxsize=MAX_ENTRIES)(function)
    _clears.append(cached.cache_clear)
    return cast(F, cached)


def on_reset(clear: Callable[[], object]) -> None:
    """Have `reset` call `clear`."""
    _clears.append(clear)


def warn_once(text: str) -> None:
    """Warn that `text`, unless this process has."""
    if text not in _warned:
        warnings.warn(f"cutefce: {text}", stacklevel=3)
        _warned.add(text)


def reset() -> None:
    """Clear every registered cache: plans, primitives, lookups and verdicts.

    A cached function that runs meanwhile in another thread may keep the value that it returns.
    """
    for clear in _clears:
        clear()
