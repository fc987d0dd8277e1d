"""What runs the calls of a test: torch on a CPU, models of the kernels, their PTX, or a GPU."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm90 import PACKED_192
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs, PortableTiles
from tests.support import kernel_models, tiers
from tests.support.reference import Case
from tests.support.tiers import Values, pairwise_of

COOPERATIVE = GemmConfig(128, 64, cluster=1, stages=3, pingpong=False)
EMULATED = KernelConfigs(COOPERATIVE, COOPERATIVE, COOPERATIVE, packed_sums=PACKED_192)
"""Small tiles of the kernels whose PTX is emulated."""


@dataclass(frozen=True)
class Backend:
    """One of the ways in which calls run."""

    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    arch: str | None = None
    """The architecture whose kernels are launched on a CPU: torch models of them, or their PTX."""
    selects: bool = False
    """Whether kernels compute only the rows that count, and read no others."""
    emulated: bool = False

    @property
    def tokens(self) -> int:
        """Return how many tokens are several chunks, and not too many for the emulator."""
        return 70 if self.emulated else 150

    def serve(self, patch: pytest.MonkeyPatch, tiles: PortableTiles, **how: Any) -> None:
        """Route calls to this backend; `how` are arguments of `serve_calls`."""
        if self.arch is None:
            return
        pytest.importorskip("cutlass")
        if self.emulated:
            from tests.emulation.hopper import run

            emulated = {"replacement": lambda kernel: functools.partial(run, kernel)}
            how = {"configs": EMULATED, "num_sms": 2, **emulated, **how}
        arch = arch_named(self.arch)
        kernel_models.serve_calls(patch, arch, tiles, selects=self.selects, **how)

    def hide(self, h: Tensor, ignored: Tensor) -> None:
        """Make the rows of h (N, D) that are `ignored` (N,) NaN, if kernels do not read them."""
        if self.selects:
            h[ignored] = torch.nan

    def hide_ignored(self, case: Case) -> None:
        """Do so of the rows whose target is -100."""
        self.hide(case.h, case.y == -100)


PORTABLE = {"portable": Backend()}
FLOAT32 = {"portable, float32": Backend(dtype=torch.float32)}
KERNELS = {
    "kernels of sm_90a": Backend(arch="sm_90a", selects=True),
    "kernels of sm_100a": Backend(arch="sm_100a", selects=True),
    "kernels of sm_90a, all rows": Backend(arch="sm_90a"),
    "kernels of sm_100a, all rows": Backend(arch="sm_100a"),
}
OTHER_KERNELS = [*KERNELS][1:]
PTX = {
    "emulated sm_90a": Backend(arch="sm_90a", selects=True, emulated=True),
    "emulated sm_90a, all rows": Backend(arch="sm_90a", emulated=True),
}
GPU = {"cuda": Backend("cuda")}
GPU_FLOAT32 = {"cuda, float32": Backend("cuda", torch.float32)}

_on_gpu = False


def use_gpu() -> None:
    """Let tests run on a GPU alone; this is before they are collected."""
    global _on_gpu
    _on_gpu = True


def named(float32: bool = False) -> dict[str, Backend]:
    """Return the backends of a test by their names, also in float32 if it asks for that."""
    if _on_gpu:
        return GPU | (GPU_FLOAT32 if float32 else {})
    return (FLOAT32 if float32 else {}) | PORTABLE | KERNELS


def on_backends(
    *,
    float32: bool = False,
    emulated: int = 0,
    few: Mapping[str, Values] | None = None,
    few_backends: bool = False,
    **axes: Values,
) -> pytest.MarkDecorator:
    """Parametrize by backends and other axes, as `pairwise_of` does.

    With `few_backends`, not all kernels are among those that are not slow: where another test has
    every kernel in the same layouts.
    The first so many `emulated` backends are slow, and have each value of an axis once.
    """
    some = dict(few or {})
    if few_backends:
        some["backend"] = [name for name in named(float32) if name not in OTHER_KERNELS]
    params = list(pairwise_of(some, backend=named(float32), **axes).args[1])
    for name, backend in [] if _on_gpu else list(PTX.items())[:emulated]:
        params += _each_once(name, backend, [tiers.named(values) for values in axes.values()])
    return pytest.mark.parametrize(["backend", *axes], params, indirect=["backend"])


def _each_once(name: str, backend: Backend, axes: Sequence[Sequence[tuple[str, Any]]]) -> list[Any]:
    """Return as many parameters as the longest axis has values."""
    params = []
    for number in range(max([1, *map(len, axes)])):
        chosen = [values[number % len(values)] for values in axes]
        id = "-".join([name, *(label for label, _ in chosen)])
        values = (value for _, value in chosen)
        params.append(pytest.param(backend, *values, id=id, marks=pytest.mark.slow))
    return params
