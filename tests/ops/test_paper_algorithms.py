"""The paper's Algorithms 1 and 2, as printed, against calls."""

import pytest
import torch

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.primitives.portable_projection import PortableProjection
from cutefce.ops.rows import targets as rows
from tests.support import paper
from tests.support.reference import Result, assert_as_accurate, random_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("logit_std", [0.1, 1, 30])
@pytest.mark.parametrize("window", [32, 64, 352])
def test_algorithms_1_and_2(
    window: int, logit_std: float, dtype: torch.dtype, small_tiles: PortableTiles, device: str
) -> None:
    case = random_case(70, 16, 333, dtype=dtype, device=device, logit_std=logit_std)
    projection = PortableProjection(small_tiles)
    targets = rows.make_targets(case.y, 333, LossOptions(), TensorOptions())
    losses, m, a = paper.algorithm_1(projection, case.h, case.w, targets, window)
    dx, dw = paper.algorithm_2(projection, case.h, case.w, targets, m, a, case.upstream, window)
    assert_as_accurate(Result(losses, dx, dw), case)
