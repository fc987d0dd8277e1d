"""The layouts of logits on Blackwell, evaluated on the host.

MMAs write a logit to a lane and column of tensor memory, a copy loads it into a thread's register,
and the epilogue assigns it a row and column.  All three must agree.
"""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from cutefce.cute_kernels.arch.sm100 import SINGLE_CTA, TWO_CTA
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.sm100.project_exp import ProjectExpSm100
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from tests.support.tiers import rest_slow

CONFIGS = (TWO_CTA, SINGLE_CTA)
LANE = 1 << 16
"""Stride of lanes in tensor memory addresses; that of columns is 1."""


def on_the_host(check: Callable[[], None]) -> None:
    """Run `check` in a DSL trace, where layouts can be made."""

    @cute.jit
    def trace(stream: Any) -> None:
        check()

    cute.compile(trace, make_fake_stream(), options="--gpu-arch sm_100a")


def kernel_of(config: GemmConfig) -> ProjectExpSm100:
    return ProjectExpSm100(ProjectExpSpec("sm_100a", "bfloat16", config, sums=True, store=True))


def accumulators(kernel: ProjectExpSm100) -> Any:
    """Return the accumulators of `allocate` at address 0."""
    mma = kernel.tiled_mma()
    shape = cute.append(mma.partition_shape_C(kernel.tile[:2]), kernel.arch.ACC_STAGES)
    pointer = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    return cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)


@pytest.mark.parametrize("config", rest_slow(CONFIGS))
def test_mmas_write_a_row_to_a_lane(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def check() -> None:
        owner = kernel.tiled_mma().tv_layout_C_tiled
        rows = kernel.tile[0]
        for block in range(config.cluster):
            for lane in (0, 1, 31, 32, 127):
                for column in (0, 1, 63, 64, 255):
                    place = owner((block, ((lane, column), (0, 0))))
                    assert (place % rows, place // rows) == (128 * block + lane, column)

    on_the_host(check)


@pytest.mark.parametrize("config", rest_slow(CONFIGS))
def test_accumulators_have_separate_columns(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def check() -> None:
        layout = accumulators(kernel).layout
        columns: set[int] = set()
        for number in range(kernel.arch.ACC_STAGES):
            for lane in (0, 77, 127):
                own = {
                    layout(((lane, c), 0, 0, number)) - lane * LANE for c in range(config.tile_n)
                }
                assert own == set(range(number * config.tile_n, (number + 1) * config.tile_n))
            columns |= own
        assert columns == set(range(kernel.tmem_columns))

    on_the_host(check)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_thread_reads_its_row(config: GemmConfig) -> None:
    kernel = kernel_of(config)
    epi_tile_n = kernel.epi_tile_n

    def check() -> None:
        copy, source, fragment = kernel.tmem_copy(accumulators(kernel), 0)
        for number in range(config.tile_n // epi_tile_n):
            for accumulator in range(kernel.arch.ACC_STAGES):
                # the first column of an epi_tile_n, in tensor memory
                place = source.layout((0, number, accumulator))
                assert place == accumulator * config.tile_n + number * epi_tile_n
        # register i is z[i] of the epilogue
        assert [fragment.layout(i) for i in range(epi_tile_n)] == list(range(epi_tile_n))
        tile = cute.make_identity_tensor((config.tile_m, epi_tile_n))
        for thread in range(config.tile_m):
            own = copy.get_slice(thread).partition_D(tile)
            assert [own[(i, 0), 0, 0] for i in range(epi_tile_n)] == [
                (thread, i) for i in range(epi_tile_n)
            ]

    on_the_host(check)


def test_a_warp_reads_its_own_lanes() -> None:
    kernel = kernel_of(SINGLE_CTA)

    def check() -> None:
        copy, *_ = kernel.tmem_copy(accumulators(kernel), 0)
        for warp in range(4):
            # a tile's rows are numbered by warp first: row 32·w + l is number w + 4·l
            numbers = {copy.layout_src_tv_tiled(((0, warp), ((0, lane), 0))) for lane in range(32)}
            assert {32 * (n % 4) + n // 4 for n in numbers} == set(range(32 * warp, 32 * warp + 32))

    on_the_host(check)


def test_epilogue_tiles_have_the_layout_of_tma() -> None:
    """Swizzled rows of 128 bytes, for a tensor map of 64 16-bit columns."""
    kernel = kernel_of(SINGLE_CTA)

    def check() -> None:
        epi_tiles = 4 * kernel.arch.EPI_STAGES
        layout = sm100.make_smem_layout_epi(
            kernel.dtype, LayoutEnum.ROW_MAJOR, (32, kernel.epi_tile_n), epi_tiles
        )
        assert str(layout.inner) == "S<3,4,3>"
        for row in range(32):
            for column in (0, 8, 63):
                for number in range(epi_tiles):
                    place = layout.outer((row, column, number))
                    assert place == (32 * number + row) * kernel.epi_tile_n + column

    on_the_host(check)


@pytest.mark.parametrize("config", rest_slow(CONFIGS))
def test_stages_have_the_layout_of_tma(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def check() -> None:
        mma, (tile_m, tile_n, step) = kernel.tiled_mma(), kernel.tile
        for layout, rows in (
            (sm100.make_smem_layout_a(mma, kernel.tile, kernel.dtype, config.stages), tile_m),
            (sm100.make_smem_layout_b(mma, kernel.tile, kernel.dtype, config.stages), tile_n),
        ):
            rows //= config.cluster
            assert str(layout.inner) == "S<3,4,3>"
            for row in (0, 7, 8, rows - 1):
                for block in range(step // 16):
                    for stage in range(config.stages):
                        place = layout.outer(((row, 5), 0, block, stage))
                        assert place == (stage * rows + row) * step + block * 16 + 5

    on_the_host(check)
