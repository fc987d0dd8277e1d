"""Which primitives serve a problem here."""

import functools

from cutefce.autotune_cache import lookup
from cutefce.cute_kernels.problem import Problem, TileConfig
from cutefce.ops.primitives import Primitives
from cutefce.ops.torch_primitives import TorchPrimitives


def primitives_for(problem: Problem) -> Primitives:
    """Return the primitives for `problem`, tiled as `lookup` says."""
    return _torch_primitives(lookup(problem))


@functools.cache
def _torch_primitives(config: TileConfig) -> Primitives:
    return TorchPrimitives(config)
