"""Matrices of rank one that are added to dX and dW: the portable path, and the launches."""

import pytest
import torch

from cutefce.autotune_cache.defaults import widest_window
from cutefce.cute_kernels import kernel_set
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.portable_gradients import PortableGradients
from cutefce.ops.primitives.primitives import Primitives
from tests.support import rank_one
from tests.support.kernel_models import use_models
from tests.support.tiers import rest_slow

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", rest_slow(rank_one.SHAPES, default=2))
def test_the_portable_path(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    gradients = PortableGradients(window=300)
    rank_one.check_dx(gradients, shape, dtype, device)
    rank_one.check_dw(gradients, shape, dtype, device)


@pytest.fixture(params=ARCHS, ids=lambda arch: arch.name)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Primitives:
    """Return the launches of an architecture's kernels, with models in their places."""
    use_models(monkeypatch)
    configs = request.param.default_configs(tokens=8192, hidden=4096, num_sms=132)
    tiles = widest_window(Problem(1, 64, 1000, "bfloat16", "cuda"))
    return kernel_primitives(tiles, kernel_set.kernel_set(request.param, "bfloat16", configs), 132)


@pytest.mark.parametrize("shape", rest_slow(rank_one.SHAPES, default=2))
def test_the_launches_of_kernels(shape: tuple[int, int, int], launches: Primitives) -> None:
    rank_one.check_dx(launches.gradients, shape, torch.bfloat16, "cpu")
    rank_one.check_dw(launches.gradients, shape, torch.bfloat16, "cpu")
