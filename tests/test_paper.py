"""The paper's Algorithms 1 and 2 as they stand, beside the project's own form."""

import pytest
import torch

from cutefce.cute_kernels.problem import TileConfig
from cutefce.ops import paper, strategies
from cutefce.ops.torch_primitives import TorchPrimitives
from tests.reference import Result, assert_as_accurate, ours, random_case


@pytest.mark.parametrize("logit_std", [0.1, 1, 30])
@pytest.mark.parametrize("window", [32, 64, 352])
def test_algorithms_1_and_2(
    window: int, logit_std: float, small_tiles: TileConfig, device: str
) -> None:
    case = random_case(70, 16, 333, device=device, logit_std=logit_std)
    primitives = TorchPrimitives(small_tiles)
    targets = strategies.locate(case.y, 333, -100)
    losses, m, a = paper.algorithm_1(primitives, case.h, case.w, targets, window)
    dx, dw = paper.algorithm_2(primitives, case.h, case.w, targets, m, a, case.upstream, window)
    assert_as_accurate(Result(losses, dx, dw), case)


def test_target_reference_is_the_more_accurate_in_bfloat16() -> None:
    """At a spread of 8, where most of the gradient lies in few logits."""
    case = random_case(200, 64, 1000, dtype=torch.bfloat16, logit_std=8)
    primitives = TorchPrimitives(TileConfig(window=256, tile=128, rows=64, piece=128))
    targets = strategies.locate(case.y, 1000, -100)
    _, m, a = paper.algorithm_1(primitives, case.h, case.w, targets, 256)
    dx, dw = paper.algorithm_2(primitives, case.h, case.w, targets, m, a, case.upstream, 256)
    assert_as_accurate(Result(m, dx, dw), case, ("dx", "dw"))
    assert_as_accurate(ours(case), case)
