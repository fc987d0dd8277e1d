"""Launches of kernels without a GPU: which kernels, with how many arguments, and what they share.

They share semaphores, and nothing that a garbage collector must find.
"""

import contextlib
import gc
import math
import weakref
from typing import Any

import pytest
import torch

from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.ops.operators import operators
from cutefce.ops.primitives.cute_projection import CuteProjection, PartialLse, Semaphores
from cutefce.ops.primitives.dispatch import kernel_primitives
from tests.support.backends import KERNELS
from tests.support.kernel_models import model_of
from tests.support.layouts import LAYOUTS, Layout, pinned
from tests.support.options import options_case


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
    projection = primitives
    assert isinstance(projection, CuteProjection)
    alive = weakref.ref(projection.semaphores)
    gc.collect()
    gc.disable()
    try:
        del primitives, projection
        assert alive() is None
    finally:
        gc.enable()


LAUNCHING = {
    **{name: LAYOUTS[name] for name in ("some aliased, some kept", "in chunks")},
    "packed sums of dX": Layout(kept=64, hidden_bits=4),
}
"""Layouts of calls that launch every kind of kernel of a step."""


@pytest.mark.parametrize("layout", LAUNCHING.values(), ids=LAUNCHING)
@pytest.mark.parametrize("name", ["kernels of sm_90a", "kernels of sm_100a"])
def test_launch_arguments_match_the_kernels(
    name: str, layout: Layout, small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, a launch checks the number of arguments, then fails at the first's device."""
    pytest.importorskip("cutlass")

    def checked(kernel: KernelSpec) -> Any:
        def launch(*arguments: Any) -> None:
            with pytest.raises(ValueError, match="expected device_type=cuda"):
                jit_cache.compiled(kernel)(*arguments)
            model_of(kernel)(*arguments)

        return launch

    KERNELS[name].serve(monkeypatch, small_tiles, replacement=checked)
    monkeypatch.setattr(operators, "_compiling_at_once", lambda *_: contextlib.nullcontext())
    for options in ([], ["label_smoothing"]):
        x = options_case(options, 150, 48, 333, dtype=torch.bfloat16)
        x.case.h[::9] *= 60
        with pinned(layout):
            x.ours(reduction=layout.reduction)


def test_partials_of_all_ranks_are_gathered(small_tiles: PortableTiles) -> None:
    """Sums from 2^-80 to 2^900, beyond the range of float32."""
    kernels = kernel_set(ARCHS[0], "bfloat16", ARCHS[0].default_configs(8192, 4096, 132))
    steps = kernel_primitives(small_tiles, kernels, 132)
    sums = torch.tensor([[0.0, 1.0], [-80.0, -80.0], [900.0, 2.0], [-torch.inf, -torch.inf]])
    semaphores, other = torch.zeros(3, dtype=torch.int32), torch.arange(4.0)
    joined = steps.gather_partials(
        PartialLse(sums, semaphores), lambda total: torch.stack([total, other])
    )
    want = torch.tensor([math.log2(3), -79, 900, -torch.inf])
    torch.testing.assert_close(joined.sums, torch.stack([want, other], 1))
    assert joined.sums.is_contiguous() and joined.semaphores is semaphores
