"""Reads the sources of the kernels once, and not after every reset of a process's caches."""

import pytest

from cutefce.cute_kernels.jit import cache as jit_cache
from tests.support.tables import KERNELS


@pytest.fixture(autouse=True)
def sources_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_cache, "source_fingerprint", lambda: KERNELS)
