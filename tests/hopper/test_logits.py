"""The GEMM of logits in float32, emulated."""

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch.sm90 import WIDE_CLUSTER2, Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.spec import LogitsSpec
from cutefce.ops.divergence import logits
from tests.emulation.hopper import run

SMALL = GemmConfig(64, 128, cluster=1, stages=2, pingpong=True)
SHARED = GemmConfig(128, 128, cluster=2, stages=3, pingpong=False)


@pytest.mark.parametrize("shape", [(150, 136, 328), (1, 8, 8), (257, 64, 520), (64, 72, 1000)])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(SMALL, "bfloat16"), (SHARED, "float16"), (WIDE_CLUSTER2, "bfloat16")],
    ids=str,
)
def test_logits(config: GemmConfig, dtype: str, shape: tuple[int, int, int]) -> None:
    """Rows and columns that are no multiple of a tile, of matrices that others surround."""
    tokens, hidden, vocab = shape
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(vocab + 9, hidden, generator=generator).to(getattr(torch, dtype))
    w = every[5 : 5 + vocab]
    h = torch.randn(tokens, hidden, generator=generator).to(w.dtype)
    memory = torch.full((tokens + 1, vocab), torch.nan)
    semaphores = torch.zeros(1, dtype=torch.int32)
    run(LogitsSpec("sm_90a", dtype, config), h, w, memory[:tokens], semaphores, 2)
    want = h.double() @ w.double().t()
    torch.testing.assert_close(memory[:tokens].double(), want, rtol=1e-5, atol=1e-4)
    assert memory[tokens:].isnan().all()


@pytest.mark.parametrize(
    ("rows", "columns", "launches"),
    [
        (256, slice(0, 384), 1),
        (512, slice(8, 392), 1),
        (200, slice(0, 384), 0),
        (256, slice(0, 380), 0),
    ],
    ids=["whole tiles", "some classes", "part of a tile", "unaligned rows"],
)
def test_a_side_launches_it(
    rows: int, columns: slice, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its tiles and waves are full, and its rows are aligned."""
    launched = []

    def emulated(kernel: LogitsSpec) -> Any:
        launched.append(kernel)
        return functools.partial(run, kernel)

    monkeypatch.setattr(logits, "compiled", emulated)
    monkeypatch.setattr(logits, "arch_of", lambda h, w: "sm_90a")
    monkeypatch.setattr(logits, "gpu_of", lambda device: Gpu(Sm90(), "NVIDIA H200", 4))
    h, w = torch.randn(rows, 64).bfloat16(), torch.randn(400, 64).bfloat16()[columns]
    out = torch.full((rows, len(w)), torch.nan)
    logits.write_logits(out, h, w)
    assert len(launched) == launches
    torch.testing.assert_close(out.double(), h.double() @ w.double().t(), rtol=1e-5, atol=1e-4)
