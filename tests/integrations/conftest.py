"""Tests against real frameworks, on the CPU, which `make test-integrations` installs.

A file without its framework is reported as skipped.
"""

import os
from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks, started

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """Return two ranks, which no other file's framework has changed."""
    with started(2) as ranks:
        yield ranks
