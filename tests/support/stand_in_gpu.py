"""A CPU that stands in for a Hopper GPU: calls take a GPU's ways, and launch models of the kernels.

Tests that use it call the public functions, and are the same on a GPU.  What makes a call one of a
GPU, and what a process remembers of calls, only this file knows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cutefce.autotune_cache import lookup
from cutefce.cute_kernels import problem, process_cache
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.ops.divergence import kernels
from cutefce.ops.operators import operators
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.primitives import dispatch
from tests.support.kernel_models import Replacement, model_of, use_models


@contextmanager
def served_by_kernels(
    device: str, replacement: Replacement = model_of
) -> Iterator[pytest.MonkeyPatch]:
    """Serve calls by a GPU's kernels, or on a CPU by models of them or another `replacement`.

    The process has computed nothing yet, and forgets what it computes.
    """
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            pytest.importorskip("cutlass")
            use_models(patch, lambda kernel: _checked(replacement(kernel)))
            for module in (dispatch, kernels):
                patch.setattr(module, "device_unsupported_reason", _unsupported_reason)
                patch.setattr(module, "gpu_of", lambda device: Gpu(Sm90(), "a model", 132))
            patch.setattr(lookup, "tables", lambda gpu: ())
            # without knowing how many tokens count
            patch.setattr(operators, "plan_of", plan_for)
        forget()
        yield patch
    forget()


def _unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    failed: str | None = dispatch._compiler_failures.get("sm_90a")
    return failed if dtype.itemsize == 2 else f"input: got dtype {dtype}"


def _checked(launch: Callable[..., None]) -> Callable[..., None]:
    """Return `launch`, which refuses operands that no kernel can read."""

    def run(*operands: Any) -> None:
        for x in tree_leaves(operands):
            if isinstance(x, Tensor):
                assert _is_readable(x), (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)
        launch(*operands)

    return run


def _is_readable(x: Tensor) -> bool:
    """Whether x has the layout that kernels read: TMA needs multiples of 16 bytes of matrices."""
    if x.ndim != 2 or x.dtype.itemsize != 2:
        return x.ndim != 1 or x.is_contiguous()
    rows = x if x.stride(1) == 1 else x.t()
    pitch = rows.stride(0) if len(rows) > 1 else 0
    return rows.stride(1) == 1 and x.data_ptr() % 16 == 0 and pitch % 8 == 0


def select_rows(patch: pytest.MonkeyPatch, selects: bool) -> None:
    """Have kernels compute only the rows that count, of however few tokens, or all rows."""
    patch.setattr(problem, "MIN_SELECTED", 1 if selects else 1 << 30)


def forget() -> None:
    """Forget what calls have found out, as if the process began."""
    process_cache.reset()
