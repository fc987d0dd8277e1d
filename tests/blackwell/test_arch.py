"""Blackwell's limits, and which architectures there are."""

import pytest
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.cute_kernels.arch import ARCHS, arch_for
from cutefce.cute_kernels.arch.base import BARRIER_BYTES
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import GemmConfig

BLACKWELL = [arch for arch in ARCHS if isinstance(arch, Sm100)]


@pytest.mark.parametrize("arch", BLACKWELL, ids=lambda arch: arch.name)
def test_memory_limits(arch: Sm100) -> None:
    for config in arch.listed["project_exp"]:
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


def test_an_unknown_architecture_among_several_is_named() -> None:
    result = CliRunner().invoke(main, ["compile", "--arch", "sm_100a,sm_80"])
    assert result.exit_code != 0
    assert "got 'sm_80', expected one of sm_90a, sm_100a, sm_103a" in result.output
