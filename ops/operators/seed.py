"""The operator that draws the seed of a call with random entries.

Graph compilers leave it as it is, so that they draw what an eager call draws; and they know that it
is random, so that what they compute again is computed with the same seed.
"""

import torch
from torch import Tensor

from cutefce.ops.operators.operators import define


def draw_seed(like: Tensor) -> Tensor:
    """Return a seed (2,) int32 from torch's default generator of the device of `like`."""
    return torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32, device=like.device)


def _fake(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int32)


_TAGS = (torch.Tag.nondeterministic_seeded,)
define(draw_seed, "(Tensor like) -> Tensor", _fake, tags=_TAGS)
