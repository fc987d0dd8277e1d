"""A tuned table for a GPU model that does not exist."""

from pathlib import Path

from cutefce.autotune_cache import lookup, tables
from cutefce.autotune_cache.tables import Entry, Key, Table
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.arch.sm90 import TALL, WIDE, Sm90
from cutefce.cute_kernels.problem import Problem

GPU = Gpu(Sm90(), "NVIDIA Test 9000", 132)
TUNED, OTHER = TALL, WIDE
VERSIONS = lookup.current_build()
OLD = {"kernels": "0123", tables.DSL_PACKAGE: "0.1"}
"""Versions of another build, whose choices are used and whose proof is not."""
KEY = Key("project_exp", "bfloat16", 4096, 131072, 8192)
ENTRY = Entry(TUNED, 12.5, 13.0)
TABLE = Table(GPU, VERSIONS, {KEY: ENTRY})
PROBLEM = Problem(8192, 4096, 131072, "bfloat16", "cuda", arch="sm_90a")


def write(path: Path, content: Table) -> None:
    """Write a table in the place of what a file holds."""
    tables.rewrite(path, lambda: content)
