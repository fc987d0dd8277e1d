"""Who owns which logit on Blackwell: the kernels' layouts, evaluated on the host.

The tensor cores put a logit at a lane and column of tensor memory, a copy puts it into a register
of a thread, and the epilogue takes it for that of a row and a column.  All three must agree.
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

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.sm100.project_exp import ProjectExpSm100
from cutefce.cute_kernels.spec import ProjectExpSpec

PAIRED, MULTICAST, SINGLE, *_ = arch_named("sm_100a").prebuilt_configs()
CONFIGS = (PAIRED, MULTICAST, SINGLE)
LANE = 1 << 16
"""What a lane is in an address of tensor memory; a column is 1."""


def on_the_host(look: Callable[[], None]) -> None:
    """Run `look` where layouts can be made."""

    @cute.jit
    def trace(stream: Any) -> None:
        look()

    cute.compile(trace, make_fake_stream(), options="--gpu-arch sm_100a")


def kernel_of(config: GemmConfig) -> ProjectExpSm100:
    return ProjectExpSm100(ProjectExpSpec("sm_100a", "bfloat16", config, sums=True, store=True))


def accumulators(kernel: ProjectExpSm100) -> Any:
    """Return the accumulators as `allocate` does, at address 0."""
    mma = kernel.tiled_mma()
    shape = cute.append(mma.partition_shape_C(kernel.tile[:2]), kernel.arch.ACCUMULATORS)
    pointer = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
    return cute.make_tensor(pointer, mma.make_fragment_C(shape).layout)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_products_put_a_row_into_a_lane(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def look() -> None:
        owner = kernel.tiled_mma().tv_layout_C_tiled
        rows = kernel.tile[0]
        for block in range(kernel.pair):
            for lane in (0, 1, 31, 32, 127):
                for column in (0, 1, 63, 64, 255):
                    place = owner((block, ((lane, column), (0, 0))))
                    assert (place % rows, place // rows) == (128 * block + lane, column)

    on_the_host(look)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_accumulators_lie_in_columns_of_their_own(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def look() -> None:
        layout = accumulators(kernel).layout
        columns: set[int] = set()
        for number in range(kernel.arch.ACCUMULATORS):
            for lane in (0, 77, 127):
                own = {
                    layout(((lane, c), 0, 0, number)) - lane * LANE for c in range(config.tile_n)
                }
                assert own == set(range(number * config.tile_n, (number + 1) * config.tile_n))
            columns |= own
        assert columns == set(range(kernel.columns))

    on_the_host(look)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_thread_reads_the_row_that_the_epilogue_takes_for_its_own(
    config: GemmConfig,
) -> None:
    kernel = kernel_of(config)
    slab = kernel.slab

    def look() -> None:
        copy, source, fragment = kernel.reader(accumulators(kernel), 0)
        for number in range(config.tile_n // slab):
            for accumulator in range(kernel.arch.ACCUMULATORS):
                # the first column of a slab, in tensor memory
                place = source.layout((0, number, accumulator))
                assert place == accumulator * config.tile_n + number * slab
        # register i is what `read` calls z[i]
        assert [fragment.layout(i) for i in range(slab)] == list(range(slab))
        tile = cute.make_identity_tensor((config.tile_m, slab))
        for thread in range(config.tile_m):
            own = copy.get_slice(thread).partition_D(tile)
            assert [own[(i, 0), 0, 0] for i in range(slab)] == [(thread, i) for i in range(slab)]

    on_the_host(look)


def test_a_warp_reads_only_its_own_lanes() -> None:
    kernel = kernel_of(SINGLE)

    def look() -> None:
        copy, *_ = kernel.reader(accumulators(kernel), 0)
        for warp in range(4):
            # a tile's rows are numbered by warp first: row 32·w + l is number w + 4·l
            numbers = {copy.layout_src_tv_tiled(((0, warp), ((0, lane), 0))) for lane in range(32)}
            assert {32 * (n % 4) + n // 4 for n in numbers} == set(range(32 * warp, 32 * warp + 32))

    on_the_host(look)


def test_a_slab_lies_as_tma_takes_it() -> None:
    """Rows of 128 bytes, swizzled: what a tensor map of 64 16-bit columns asks for."""
    kernel = kernel_of(SINGLE)

    def look() -> None:
        slabs = 4 * kernel.arch.SLABS
        layout = sm100.make_smem_layout_epi(
            kernel.dtype, LayoutEnum.ROW_MAJOR, (32, kernel.slab), slabs
        )
        assert str(layout.inner) == "S<3,4,3>"
        for row in range(32):
            for column in (0, 8, 63):
                for number in range(slabs):
                    place = layout.outer((row, column, number))
                    assert place == (32 * number + row) * kernel.slab + column

    on_the_host(look)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_stages_hold_what_a_block_loads(config: GemmConfig) -> None:
    kernel = kernel_of(config)

    def look() -> None:
        mma, (tile_m, tile_n, step) = kernel.tiled_mma(), kernel.tile
        for layout, rows in (
            (sm100.make_smem_layout_a(mma, kernel.tile, kernel.dtype, config.stages), tile_m),
            (sm100.make_smem_layout_b(mma, kernel.tile, kernel.dtype, config.stages), tile_n),
        ):
            rows //= kernel.pair
            assert str(layout.inner) == "S<3,4,3>"
            for row in (0, 7, 8, rows - 1):
                for block in range(step // 16):
                    for stage in range(config.stages):
                        place = layout.outer(((row, 5), 0, block, stage))
                        assert place == (stage * rows + row) * step + block * 16 + 5

    on_the_host(look)
