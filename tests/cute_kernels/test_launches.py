"""What launches of kernels share: semaphores, and nothing that a garbage collector must find."""

import gc
import weakref

import pytest
import torch

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.ops.primitives.cute_projection import CuteProjection, Semaphores
from cutefce.ops.primitives.dispatch import kernel_primitives


@pytest.mark.parametrize("count", [1, 33, Semaphores.BLOCK + 1])
def test_no_launches_share_semaphores(count: int) -> None:
    """Neither launches of a call, which write what they take, nor calls."""
    taken = []
    for _ in range(3):
        semaphores = Semaphores()
        taken += [semaphores.take(count, torch.device("cpu"))[:count] for _ in range(600)]
    for number, zeros in enumerate(taken, 1):
        assert zeros.shape == (count,)
        assert not zeros.any()
        zeros.fill_(number)


@pytest.mark.parametrize("arch", [Sm90(), Sm100()], ids=lambda arch: str(arch.name))
def test_primitives_leave_nothing_to_the_garbage_collector(
    arch: Arch, small_tiles: PortableTiles
) -> None:
    """Their semaphores are GPU memory, which a call must give back when it ends."""
    configs = arch.default_configs(tokens=8192, hidden=4096, num_sms=132)
    primitives = kernel_primitives(small_tiles, kernel_set(arch, "bfloat16", configs), 132)
    projection = primitives.projection
    assert isinstance(projection, CuteProjection)
    alive = weakref.ref(projection.semaphores)
    gc.collect()
    gc.disable()
    try:
        del primitives, projection
        assert alive() is None
    finally:
        gc.enable()
