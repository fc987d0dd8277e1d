"""The gradients' products for Hopper, of exponentials e (N, V) that lie in memory.

    of the hidden states   sums (N, D) = or += e w         float32
    of the weight          sums (V, D) = or += eᵀ s        float32
    of the weight, final   out (V, D) = (eᵀ s + Σ_{i: y_i = v} c_i h_i) · unit, rounded once

with s_i = scale_i h_i.  The target's part of the last one is added in float32, where the
accumulators are, in the order in which the targets' lists name the tokens.

Shapes: e may be some columns of a wider matrix; `starts` (V + 1,) int32 says where in `order` (N,)
int64 the tokens with target v begin; c (N,), in that order, and unit (1,) are float32.  N, V and D
are dynamic; D is a multiple of 8 and rows begin at multiples of 16 bytes.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import (
    DTYPES,
    await_previous,
    matrix,
    transposed,
    vector,
)
from cutefce.cute_kernels.schedule.scheduler import Piece, Walk, indices, make_walk, piece, unit
from cutefce.cute_kernels.sm90.epilogue_store import SlabsSm90
from cutefce.cute_kernels.sm90.mainloop import CONSUMERS, GROUP, MainloopSm90, Operand
from cutefce.cute_kernels.workspace import SPLIT_K_COUNTERS


def trace(kernel: spec.GradGemmSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    dtype = DTYPES[kernel.dtype]
    rows, inner, hidden = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=8)
    a = transposed(dtype, rows, inner) if kernel.of == "weight" else matrix(dtype, rows, inner)
    targets = None
    if kernel.final:
        tokens = vector(Int64, inner), vector(Int32, cute.sym_int()), vector(Float32, inner)
        targets = Targets(*tokens, matrix(dtype, inner, hidden), vector(Float32, 1))
    return GradientSm90(kernel), (
        a,
        transposed(dtype, hidden, inner),
        matrix(dtype if kernel.final else Float32, rows, hidden),
        targets,
        vector(Int32, cute.sym_int()),
        Int32(1),
        None if kernel.final else Int32(1),
        None if kernel.final else Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


class Targets(NamedTuple):
    """The lists of tokens by target, and what is added for each of them."""

    order: cute.Tensor
    starts: cute.Tensor
    coefficient: cute.Tensor
    h: cute.Tensor
    unit: cute.Tensor


class GradientSm90(MainloopSm90):
    """The kernel and its launch, for one description."""

    def __init__(self, kernel: spec.GradGemmSpec) -> None:
        by_rows, by_columns = Operand(by_rows=True), Operand(by_rows=False)
        a = by_columns if kernel.of == "weight" else by_rows
        given = kernel.arch, kernel.dtype, kernel.config, a, by_columns
        super().__init__(*given, masked=False, leaves_out=False)
        assert kernel.WARPS * 32 == CONSUMERS * GROUP
        self.final = kernel.final
        self.slabs = SlabsSm90(self.dtype if self.final else Float32, kernel.config.tile_n)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        out: cute.Tensor,
        targets: Targets | None,
        notes: cute.Tensor,
        clusters: Int32,
        cuts: Int32 | None,
        fresh: Int32 | None,
        stream: Any,
    ) -> None:
        """Launch on `clusters` clusters: a (M, K) and b (D, K) to out (M, D).

        Sums, of which units of the last round are cut into `cuts` pieces, are added to what `out`
        holds unless they are `fresh`.
        """
        a_parts, b_parts = self.inputs(a, b)
        out_parts, adder = self.slabs.output(out), self.slabs.adder(out)
        sums, tiled_mma = (adder, cuts, fresh), self.tiled_mma(self.sharing)
        self.kernel(tiled_mma, a_parts, b_parts, out_parts, targets, notes, sums).launch(
            **self.launch_shape(clusters), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: Any,
        b: Any,
        out: Any,
        targets: Any,
        notes: cute.Tensor,
        sums: Any,
    ) -> None:
        """Hand out the roles; a, b and out are (TMA atoms, coordinates, shared memory layout)."""
        adder, cuts, fresh = sums
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_a, g_a, a_layout), (load_b, g_b, b_layout), (store, g_out, out_layout) = a, b, out
        if warp == 0:
            for load in (*loads_a, load_b):
                cpasync.prefetch_descriptor(load)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.config.stages)
        s_a = smem.allocate_tensor(self.dtype, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, b_layout.inner)
        s_out = smem.allocate_tensor(self.slabs.dtype, out_layout.outer, 1024, out_layout.inner)
        pipe = self.stages(barriers)
        walk = make_walk(self.config, self.tile[2], g_a, g_b, None, cuts)
        await_previous()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                self.load(walk, pipe, (loads_a, g_a, s_a), (load_b, g_b, s_b), notes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            to = (store, g_out, s_out), adder, fresh
            self.consume(walk, pipe, tiled_mma, (s_a, s_b), to, targets, notes)

    @cute.jit
    def consume(
        self,
        walk: Walk,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        out: Any,
        targets: Any,
        notes: cute.Tensor,
    ) -> None:
        """Consumer: multiply tile after tile, and hand it on."""
        to, adder, fresh = out
        config, tile = self.config, self.tile
        consumer, state = self.begin(walk, tiled_mma, *inputs)
        thread, group, share, turn, a, b, acc, own = consumer
        for index in cutlass.range(
            walk.cluster + turn * walk.clusters,
            indices(walk),
            walk.clusters * config.partials_per_row,
        ):
            own_part, others = piece(walk, index), piece(walk, index + walk.clusters)
            row, column, _ = unit(walk, config.raster_group, None, own_part.unit)
            top = (row * config.cluster + walk.rank) * tile[0] + share * 64
            left = column * tile[1]
            steps, between = own_part.end - own_part.first, others.end - others.first
            state = self.multiply(pipe, tiled_mma, acc, a, b, state, steps, between, group)
            if cutlass.const_expr(self.final):
                self.finish(acc, own, targets, top, left, walk)
                self.put(acc, thread, group, to, top, left, walk, None)
            else:
                note = notes.iterator + self.note(own_part, walk, share, thread)
                if own_part.earlier > 0:
                    await_adds(note, own_part.earlier)
                adds = fresh == 0 or own_part.earlier > 0
                self.put(acc, thread, group, to, top, left, walk, (adder, adds))
                if own_part.later > 0:
                    tell_adds(note)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def finish(
        self,
        acc: cute.Tensor,
        own: cute.Tensor,
        targets: Targets,
        top: Int32,
        left: Int32,
        walk: Walk,
    ) -> None:
        """Add what the tokens contribute whose target a row is, and multiply by the unit."""
        first = left + own[0][1]
        limit = walk.columns - first
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                begin, end = Int32(0), Int32(0)
                if row < walk.rows:
                    begin, end = targets.starts[row], targets.starts[row + 1]
                for place in cutlass.range(begin, end, unroll=4):
                    token = targets.order[place]
                    factor = targets.coefficient[place]
                    pairs = cute.zipped_divide(targets.h[token, None], (2,))
                    for j in cutlass.range_constexpr(self.tile[1] // 8):
                        if 8 * j < limit:
                            pair = cute.make_rmem_tensor((2,), self.dtype)
                            cute.autovec_copy(pairs[None, first // 2 + 4 * j], pair)
                            wide = pair.load().to(Float32)
                            for v in cutlass.range_constexpr(2):
                                at = (v, half, j), block, 0
                                acc[at] = acc[at] + factor * wide[v]
        acc.store(acc.load() * targets.unit[0])

    @cute.jit
    def note(self, part: Piece, walk: Walk, share: Int32, thread: Int32) -> Int32:
        """Return where a warp notes the pieces of a unit that it has added."""
        warp = cute.arch.make_warp_uniform((share * GROUP + thread) // 32)
        block = part.unit % walk.clusters * self.config.cluster + walk.rank
        return SPLIT_K_COUNTERS + block * spec.GradGemmSpec.WARPS + warp

    @cute.jit
    def put(
        self,
        acc: cute.Tensor,
        thread: Int32,
        group: Int32,
        out: Any,
        top: Int32,
        left: Int32,
        walk: Walk,
        add: Any,
    ) -> None:
        """Store the tile, or add it, see `SlabsSm90.put`."""
        width = self.slabs.width
        for block in cutlass.range_constexpr(self.blocks):
            for number in cutlass.range_constexpr(self.tile[1] // width):
                if left + number * width < walk.columns:
                    values = cute.make_rmem_tensor((2, 2, width // 8), Float32)
                    for j in cutlass.range_constexpr(width // 8):
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                of = (v, half, number * (width // 8) + j), block, 0
                                values[v, half, j] = acc[of]
                    at = top + block * 64 * self.sharing, left // width + number
                    self.slabs.put(values, thread, group, out, at, add)


@cute.jit
def await_adds(note: Any, pieces: Int32) -> None:
    """Wait until so many pieces of a unit were added: sums are the same in every run."""
    if cute.arch.lane_idx() == 0:
        added = cute.arch.load(note, Int32, sem="acquire", scope="gpu")
        while added < pieces:
            added = cute.arch.load(note, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()
    cute.arch.fence_proxy("async.global")


@cute.jit
def tell_adds(note: Any) -> None:
    """Note that a warp's part of a piece was added."""
    cute.arch.cp_async_bulk_wait_group(0)
    cute.arch.sync_warp()
    if cute.arch.lane_idx() == 0:
        cute.arch.red(note, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
