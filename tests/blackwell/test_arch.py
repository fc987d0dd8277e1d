"""Blackwell's limits, polynomial exponentials, and that only verified kernels are dispatched."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray

from cutefce.__main__ import main
from cutefce.autotune_cache import verdicts
from cutefce.autotune_cache.tuning import verify
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch import ARCHS, arch_for, arch_named
from cutefce.cute_kernels.arch.base import BARRIER_BYTES, Arch
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.common.exp2 import poly_exp2
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.parts import STEP
from cutefce.ops.primitives import dispatch
from tests.support.tiers import rest_slow

BLACKWELL = [arch for arch in ARCHS if isinstance(arch, Sm100)]

Numbers = NDArray[np.float32]


def exp2(x: Numbers) -> Numbers:
    """Return 2**x as the kernel computes it, except that its FMAs round twice here."""

    def clamp(x: Numbers, low: float, high: float) -> Numbers:
        return np.minimum(np.maximum(x, np.float32(low)), np.float32(high))

    def shift_bits(x: Numbers) -> Numbers:
        return (x.view(np.int32) << 23).view(np.float32)

    with np.errstate(over="ignore"):
        result: Numbers = poly_exp2(x, clamp, shift_bits)
    assert result.dtype == np.float32
    return result


def test_polynomial_exponentials_are_as_accurate_as_the_hardware() -> None:
    whole = np.arange(-126, 128, dtype=np.float32)
    x = np.concatenate([np.linspace(n - 0.5, n + 0.5, 4001, dtype=np.float32) for n in whole])
    x = x[(x >= -126) & (x < 127.4)]
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(exp2(x) / exact - 1).max() < 2.5e-7


def test_polynomial_exponentials_of_extremes() -> None:
    x = np.array([-np.inf, -1e30, -127, 128, 1e30, np.inf, np.nan], np.float32)
    expected = np.array([0, 0, 0, np.inf, np.inf, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(exp2(x), expected)
    tiny = exp2(np.linspace(-127, -126, 1001, dtype=np.float32))
    assert ((tiny >= 0) & (tiny < 1.000001 * 2**-126)).all()


def test_columns_with_polynomial_exponentials() -> None:
    pytest.importorskip("cutlass")
    from cutefce.cute_kernels.common.exp2 import uses_poly_exp2

    for emulated in range(17):
        columns = [uses_poly_exp2(column, emulated) for column in range(64)]
        assert sum(columns) == 4 * emulated
    # evenly spread, so that both units are busy
    assert [i for i in range(16) if uses_poly_exp2(i, 4)] == [0, 4, 8, 12]


@pytest.mark.parametrize("arch", BLACKWELL, ids=lambda arch: arch.name)
def test_memory_limits(arch: Sm100) -> None:
    for config in arch.prebuilt_configs():
        epilogue = arch.EPI_STAGES * config.tile_m * arch.EPI_TILE_COLUMNS * 2
        used = BARRIER_BYTES + config.stages * arch.stage_bytes(config) + epilogue
        assert used <= arch.smem_bytes == 227 << 10
        assert arch.used_tmem_columns(config) == 512
    assert arch.used_tmem_columns(GemmConfig(128, 192, 1, 4, False)) == 512
    assert arch.used_tmem_columns(GemmConfig(128, 64, 1, 4, False)) == 128


def test_architectures_by_capability() -> None:
    found = {capability: arch_for(capability) for capability in ((9, 0), (10, 0), (10, 3), (12, 0))}
    names = [arch.name if arch else None for arch in found.values()]
    assert names == ["sm_90a", "sm_100a", "sm_103a", None]
    # polynomials serve only where the hardware's throughput is low
    assert any(config.poly_exp2_per_16 for config in arch_named("sm_100a").prebuilt_configs())
    assert not any(config.poly_exp2_per_16 for config in arch_named("sm_103a").prebuilt_configs())


@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_only_verified_kernels_are_dispatched(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="a new GPU", multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: arch.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_missing_reason", lambda: None)
    monkeypatch.setattr(verdicts, "known", lambda *_: None)
    answers = iter((verdicts.Verdict(False, "it hung"), verdicts.Verdict(True)))
    monkeypatch.setattr(verify, "verify_call", lambda *_: next(answers))
    process_cache.reset()
    call = torch.device("cuda"), "bfloat16", (4096, 2048, 128256), STEP
    obstacle = dispatch.unproven_reason(*call)
    assert obstacle == ("the kernels failed on a new GPU (it hung); to try again: cutefce verify")
    process_cache.reset()
    assert dispatch.unproven_reason(*call) is None
    process_cache.reset()


def test_an_unknown_architecture_among_several_is_named() -> None:
    result = CliRunner().invoke(main, ["compile", "--arch", "sm_100a,sm_80"])
    assert result.exit_code != 0
    assert "got 'sm_80', expected one of sm_90a, sm_100a, sm_103a" in result.output
