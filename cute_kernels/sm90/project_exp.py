"""`project_exp` for Hopper: logits z = h wᵀ that live and die in registers.

The mainloop (`mainloop_sm90`) leaves a tile of logits in a warpgroup's registers; what is done
with them there is this file.  A row's maximum and sum stay in registers for a whole unit.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.common.dsl import LOG2_E, exp2
from cutefce.cute_kernels.common.online_softmax import Rows, accumulate, arguments, finite
from cutefce.cute_kernels.schedule.scheduler import Walk, make_walk, unit
from cutefce.cute_kernels.sm90.epilogue_store import SlabsSm90
from cutefce.cute_kernels.sm90.mainloop import MainloopSm90, Operand


def trace(kernel: spec.ProjectExpSpec) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    return ProjectExpSm90(kernel), arguments(kernel)


class ProjectExpSm90(MainloopSm90):
    """The kernel and its launch, for one description."""

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        by_rows = Operand(by_rows=True)
        given = kernel.arch, kernel.dtype, kernel.config, by_rows, by_rows
        super().__init__(*given, masked=kernel.masked, leaves_out=True)
        self.sums, self.store = kernel.sums, kernel.store
        self.slabs = SlabsSm90(self.dtype, kernel.config.tile_n)

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w: cute.Tensor,
        reference: cute.Tensor,
        target: cute.Tensor,
        sums: cute.Tensor | None,
        exps: cute.Tensor | None,
        notes: cute.Tensor,
        first: Int32,
        windows: Int32,
        clusters: Int32,
        stream: Any,
    ) -> None:
        """Launch on `clusters` clusters, which must fit on the device at the same time."""
        h_parts, w_parts = self.inputs(h, w)
        e_parts = None, None, None
        if cutlass.const_expr(self.store):
            e_parts = self.slabs.output(exps)
        self.kernel(
            self.tiled_mma(self.sharing),
            h_parts,
            w_parts,
            e_parts,
            Rows(reference, target, sums, notes, first),
            windows,
        ).launch(**self.launch_shape(clusters), stream=stream)

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        h: Any,
        w: Any,
        e: Any,
        rows: Rows,
        windows: Int32,
    ) -> None:
        """Hand out the roles; h, w and e are (TMA atoms, coordinates, shared memory layout)."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_h, g_h, h_layout), (load_w, g_w, w_layout), (store_e, g_e, e_layout) = h, w, e
        if warp == 0:
            for load in (*loads_h, load_w):
                cpasync.prefetch_descriptor(load)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        s_h = smem.allocate_tensor(self.dtype, h_layout.outer, 1024, h_layout.inner)
        s_w = smem.allocate_tensor(self.dtype, w_layout.outer, 1024, w_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.dtype, e_layout.outer, 1024, e_layout.inner)
        pipe = self.stages(barriers)
        walk = make_walk(config, self.tile[2], g_h, g_w, windows)
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                # h and w are older than the kernel before the forward; one row block needs no notes
                if not self.sums or walk.row_blocks > 1:
                    cute.arch.griddepcontrol_wait()
                self.load(walk, pipe, (loads_h, g_h, s_h), (load_w, g_w, s_w), rows.notes)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(walk, pipe, tiled_mma, (s_h, s_w), (store_e, g_e, s_e), rows)

    @cute.jit
    def consume(
        self,
        walk: Walk,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        e: Any,
        rows: Rows,
    ) -> None:
        """Consumer: multiply tile after tile and turn the logits into sums and exponentials."""
        config, tile = self.config, self.tile
        consumer, state = self.begin(walk, tiled_mma, *inputs)
        thread, group, share, turn, a, b, acc, own = consumer
        if cutlass.const_expr(self.masked):
            cute.arch.griddepcontrol_wait()  # the notes are of the kernel before
        highest = cute.make_rmem_tensor((2, self.blocks), Float32)
        total = cute.make_rmem_tensor((2, self.blocks), Float32)
        for index in cutlass.range(walk.cluster, walk.row_blocks * walk.windows, walk.clusters):
            row, window, end = unit(
                walk, config.raster_group, rows.notes if self.masked else None, index
            )
            top = (row * config.cluster + walk.rank) * tile[0] + share * 64
            highest.fill(-Float32.inf)
            total.fill(0.0)
            for column in cutlass.range(
                window + turn * walk.windows, end, walk.windows * config.partials_per_row
            ):
                steps = walk.steps
                state = self.multiply(pipe, tiled_mma, acc, a, b, state, steps, steps, group)
                cute.arch.griddepcontrol_wait()  # the products need nothing of the kernel before
                left = column * tile[1]
                self.hide(acc, own, rows, top, left, walk)
                if cutlass.const_expr(self.sums):
                    for block in cutlass.range_constexpr(self.blocks):
                        for half in cutlass.range_constexpr(2):
                            highest[half, block], total[half, block] = accumulate(
                                acc[(None, half, None), block, 0],
                                highest[half, block],
                                total[half, block],
                            )
                if cutlass.const_expr(self.store):
                    self.put(acc, own, thread, group, e, rows.reference, top, left, walk)
            if cutlass.const_expr(config.pingpong):
                tiles = (end - window + walk.windows - 1) // walk.windows
                turn = (turn + cutlass.max(tiles, 0)) % 2
            if cutlass.const_expr(self.sums):
                cute.arch.griddepcontrol_wait()  # a warpgroup may have no tile of a unit
                part = window * config.partials_per_row
                if cutlass.const_expr(config.pingpong):
                    part += group
                self.flush(highest, total, own, thread, rows, top, part, walk)
        if cutlass.const_expr(self.store):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def hide(
        self,
        acc: cute.Tensor,
        own: cute.Tensor,
        rows: Rows,
        top: Int32,
        left: Int32,
        walk: Walk,
    ) -> None:
        """Set the logits of targets, and of columns beyond the vocabulary, to -inf."""
        offset = own[0][1]
        limit = walk.columns - left - offset
        targets = cute.make_rmem_tensor((2, self.blocks), Int32)
        found = left + self.tile[1] > walk.columns
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                column = Int32(-1)
                if row < walk.rows:
                    column = Int32(rows.target[row] - rows.first) - left
                targets[half, block] = column - offset
                found = found or (column >= 0 and column < self.tile[1])
        if found:
            for block in cutlass.range_constexpr(self.blocks):
                for half in cutlass.range_constexpr(2):
                    for j in cutlass.range_constexpr(self.tile[1] // 8):
                        for v in cutlass.range_constexpr(2):
                            column = 8 * j + v
                            if targets[half, block] == column or limit <= column:
                                acc[(v, half, j), block, 0] = -Float32.inf

    @cute.jit
    def flush(
        self,
        highest: cute.Tensor,
        total: cute.Tensor,
        own: cute.Tensor,
        thread: Int32,
        rows: Rows,
        top: Int32,
        part: Int32,
        walk: Walk,
    ) -> None:
        """Join the four threads that share a row and write log2 of its sum, relative to ρ."""
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                before = highest[half, block]
                after = before
                for offset in cutlass.range_constexpr(1, 3):
                    other = cute.arch.shuffle_sync_bfly(after, offset=offset)
                    after = cute.arch.fmax(after, other)
                joint = total[half, block] * exp2(before - finite(after))
                for offset in cutlass.range_constexpr(1, 3):
                    joint += cute.arch.shuffle_sync_bfly(joint, offset=offset)
                if thread % 4 == 0 and row < walk.rows:
                    distance = after - rows.reference[row] * LOG2_E
                    rows.sums[row, part] = distance + cute.math.log2(joint, fastmath=True)

    @cute.jit
    def put(
        self,
        acc: cute.Tensor,
        own: cute.Tensor,
        thread: Int32,
        group: Int32,
        e: Any,
        reference: cute.Tensor,
        top: Int32,
        left: Int32,
        walk: Walk,
    ) -> None:
        """Store the tile's exponentials, each warp its own 16 rows of every 64, slab by slab."""
        width = self.slabs.width
        base = cute.make_rmem_tensor((2,), Float32)
        for block in cutlass.range_constexpr(self.blocks):
            for half in cutlass.range_constexpr(2):
                row = self.row(own, top, block, half)
                base[half] = Float32.inf
                if row < walk.rows:
                    base[half] = reference[row] * LOG2_E
            for number in cutlass.range_constexpr(self.tile[1] // width):
                if left + number * width < e[1].shape[1]:
                    values = cute.make_rmem_tensor((2, 2, width // 8), Float32)
                    for j in cutlass.range_constexpr(width // 8):
                        for half in cutlass.range_constexpr(2):
                            for v in cutlass.range_constexpr(2):
                                z = acc[(v, half, number * (width // 8) + j), block, 0]
                                values[v, half, j] = exp2(z * LOG2_E - base[half])
                    at = top + block * 64 * self.sharing, left // width + number
                    self.slabs.put(values, thread, group, e, at)
