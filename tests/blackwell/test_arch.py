"""Blackwell's limits, and that only verified kernels are dispatched."""

from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.autotune_cache import verdicts
from cutefce.autotune_cache.tuning import verify
from cutefce.autotune_cache.verdicts import STEP
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch import ARCHS, arch_for
from cutefce.cute_kernels.arch.base import BARRIER_BYTES, TILE_K, Arch
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.config import GemmConfig
from cutefce.ops.primitives import dispatch
from tests.support.tiers import rest_slow

BLACKWELL = [arch for arch in ARCHS if isinstance(arch, Sm100)]


@pytest.mark.parametrize("arch", BLACKWELL, ids=lambda arch: arch.name)
def test_memory_limits(arch: Sm100) -> None:
    for config in arch.listed["project_exp"]:
        epilogue = arch.EPI_STAGES * config.tile_m * arch.EPI_TILE_COLUMNS * 2
        stage = (config.tile_m + config.tile_n // config.cluster) * TILE_K * 2
        used = BARRIER_BYTES + config.stages * stage + epilogue
        assert used <= arch.smem_bytes == 227 << 10
        assert arch.used_tmem_columns(config) == 512
    assert arch.used_tmem_columns(GemmConfig(128, 192, 1, 4, False)) == 512
    assert arch.used_tmem_columns(GemmConfig(128, 64, 1, 4, False)) == 128


def test_architectures_by_capability() -> None:
    found = {capability: arch_for(capability) for capability in ((9, 0), (10, 0), (10, 3), (12, 0))}
    names = [arch.name if arch else None for arch in found.values()]
    assert names == ["sm_90a", "sm_100a", "sm_103a", None]


@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_only_verified_kernels_are_dispatched(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="a new GPU", multi_processor_count=148)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: arch.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dispatch, "_missing_reason", lambda: None)
    monkeypatch.setattr(verdicts, "known", lambda *_: None)
    answers = iter((verdicts.Verdict(False, "it hung"), verdicts.Verdict(True)))
    monkeypatch.setattr(verify, "verify_once", lambda *_: next(answers))
    process_cache.reset()
    call = torch.device("cuda"), "bfloat16", STEP
    obstacle = dispatch.unproven_reason(*call)
    assert obstacle == ("the kernels failed on a new GPU (it hung); to try again: cutefce verify")
    process_cache.reset()
    assert dispatch.unproven_reason(*call) is None
    process_cache.reset()


def test_an_unknown_architecture_among_several_is_named() -> None:
    result = CliRunner().invoke(main, ["compile", "--arch", "sm_100a,sm_80"])
    assert result.exit_code != 0
    assert "got 'sm_80', expected one of sm_90a, sm_100a, sm_103a" in result.output
