"""Triton's kernels fit the architectures that run them; no GPU is needed to compile them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import rest_slow

triton_kernels = pytest.importorskip("cutefce.ops.primitives.triton_kernels")

SHARED_BYTES = {86: 99 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory of a thread block, by compute capability."""


KERNELS = {
    "of rows": ["packed", "dX", "largest"],
    "of tiles": ["sums", "stored", "sums, stored, all options"],
    "of blocks": ["blocks", "blocks, all options"],
    "of dW": ["dW", "packed dW"],
}


@pytest.mark.parametrize("kind", rest_slow([*KERNELS]))
@pytest.mark.parametrize("capability", rest_slow([*SHARED_BYTES]))
def test_kernels_fit(capability: int, kind: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    given = str(capability), str(SHARED_BYTES[capability]), *KERNELS[kind]
    command = [sys.executable, "-m", "tests.support.triton_builds", *given]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for name, taken in json.loads(ran.stdout).items():
        assert taken["shared"] <= SHARED_BYTES[capability], name
        if name in ("sums", "stored"):  # a multiprocessor keeps a KiB for each thread block
            every = triton_kernels.BLOCKS_PER_SM * (taken["shared"] + 1024)
            assert every <= SHARED_BYTES[capability] + 1024, name
        assert taken["registers"] <= 255, name
        has_operands = kind != "of rows" and "terms" not in name
        assert taken["copies"] or not has_operands, "they are loaded while others are multiplied"
        # all options in one kernel, whose tile takes half of the registers, may spill
        assert taken["stack"] <= (4096 if "options" in name else 64), name
