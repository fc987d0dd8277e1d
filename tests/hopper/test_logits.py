"""The GEMM of logits in float32, emulated."""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.arch.sm90 import WIDE_CLUSTER2, Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.spec.divergence import logits_kernel
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.ops.divergence import kernels
from cutefce.ops.rows.logit_map import LogitMap
from tests.emulation.hopper import run
from tests.support.tiers import rest_slow

SMALL = GemmConfig(64, 128, cluster=1, stages=2, pingpong=True)
SHARED = GemmConfig(128, 128, cluster=2, stages=3, pingpong=False)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(150, 136, 328), (1, 8, 8), (257, 64, 520), (64, 72, 1000)])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [(SMALL, "bfloat16"), (SHARED, "float16"), (WIDE_CLUSTER2, "bfloat16")],
    ids=str,
)
def test_logits(
    config: GemmConfig, dtype: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and columns that are no multiple of a tile, of matrices that others surround."""
    monkeypatch.setattr(kernels, "compiled", lambda kernel: functools.partial(run, kernel))
    tokens, hidden, vocab = shape
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(vocab + 9, hidden, generator=generator).to(getattr(torch, dtype))
    w = every[5 : 5 + vocab]
    h = torch.randn(tokens, hidden, generator=generator).to(w.dtype)
    memory = torch.full((tokens + 1, vocab), torch.nan)
    sums = kernels.launch(kernel_of(config, dtype), 2, memory[:tokens], h, w)
    want = h.double() @ w.double().t()
    torch.testing.assert_close(memory[:tokens].double(), want, rtol=1e-5, atol=1e-4)
    assert memory[tokens:].isnan().all()
    check_sums(sums, want)


def kernel_of(config: GemmConfig, dtype: str = "bfloat16") -> ProjectExpSpec:
    kernel = logits_kernel(Sm90(), dtype)
    assert kernel is not None
    return replace(kernel, config=config)


def check_sums(sums: Tensor, logits: Tensor) -> None:
    """Compare with the log-sum-exps of `logits` in float64."""
    lse = (sums[1].double().log() + sums[0].double() * math.log(2)).logsumexp(1)
    torch.testing.assert_close(lse, logits.logsumexp(1), rtol=1e-6, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", rest_slow([1e4, 1.0]))
@pytest.mark.parametrize("cap", rest_slow([0.1, None]))
def test_logits_of_a_model(
    scale: float, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With scales of rows, biases and a softcap; a row of no number is alone."""
    monkeypatch.setattr(kernels, "compiled", lambda kernel: functools.partial(run, kernel))
    h, w, out = torch.randn(70, 40).bfloat16(), torch.randn(304, 40).bfloat16(), torch.ones(70, 304)
    h[3, 0] = torch.nan
    row_scale, bias = scale * (1 + torch.rand(70)), torch.randn(304)
    transform = LogitMap(row_scale, bias, cap, None, 1.0)
    sums = kernels.launch(kernel_of(SMALL), 3, out, h, w, transform)
    raw = h.double() @ w.double().t() + bias.double()
    want = torch.tanh(cap * raw) if cap else raw
    want *= row_scale.double()[:, None]
    numbers = torch.arange(70) != 3
    limits: Any = {"rtol": 1e-5, "atol": 1e-5 * scale}
    torch.testing.assert_close(out.double()[numbers], want[numbers], **limits)
    assert out[3].isnan().all() and sums[1, 3].isnan().any()
    check_sums(sums[:, numbers], out[numbers].double())


SIDES = {
    "part of a tile": (200, slice(0, 384), 0),
    "unaligned rows": (256, slice(0, 380), 0),
    "whole tiles": (256, slice(0, 384), 1),
    "some classes": (512, slice(8, 392), 1),
}
"""Rows, columns and launches."""


@pytest.mark.parametrize("side", rest_slow(SIDES, default=2))
def test_a_side_launches_it(side: tuple[int, slice, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its tiles and waves are full, and its rows are aligned."""
    rows, columns, launches = side
    launched = []

    def emulated(kernel: ProjectExpSpec) -> Any:
        launched.append(kernel)
        return functools.partial(run, kernel)

    monkeypatch.setattr(kernels, "compiled", emulated)
    monkeypatch.setattr(kernels, "arch_of", lambda *_: "sm_90a")
    monkeypatch.setattr(kernels, "gpu_of", lambda device: Gpu(Sm90(), "NVIDIA H200", 4))
    h, w = torch.randn(rows, 64).bfloat16(), torch.randn(400, 64).bfloat16()[columns]
    out = torch.full((rows, len(w)), torch.nan)
    sums = kernels.write_logits(out, h, w, None)
    assert len(launched) == launches == int(sums is not None)
    torch.testing.assert_close(out.double(), h.double() @ w.double().t(), rtol=1e-5, atol=1e-4)
