"""The launch of `project_exp` on Hopper, and the roles of its warps, for any epilogue."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.online_softmax import ProjectExp, Rows
from cutefce.cute_kernels.schedule.scheduler import (
    RowCount,
    TileScheduler,
    make_tile_scheduler,
)
from cutefce.cute_kernels.sm90.mainloop import Consumer, MainloopSm90, Operand
from cutefce.cute_kernels.spec import gemm as spec


class LogitTile(NamedTuple):
    """A tile of logits in a warpgroup's accumulators, and what its epilogue reads."""

    consumer: Consumer
    rows: Rows
    m_start: Int32
    """The first token, along wgmma's M."""
    n_start: Int32
    """The first column, along its N."""
    scheduler: TileScheduler


class ProjectExpLaunchSm90(ProjectExp, MainloopSm90):
    """A `project_exp` whose epilogue is in a subclass: `consume`, and `epilogue.tma_store`."""

    epilogue: Any

    def __init__(self, kernel: spec.ProjectExpSpec) -> None:
        k_major = Operand(k_major=True)
        operands = kernel.arch, kernel.dtype, kernel.config, k_major, k_major
        super().__init__(*operands, only_flagged=kernel.only_flagged, skip_missing_rows=True)
        self.logits, self.sums, self.store = kernel.logits, kernel.sums, kernel.store

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """See `ProjectExp`."""
        x = operands
        a_loads, b_load = self.tma_loads(x.h, x.w)
        e_store = None, None, None
        if cutlass.const_expr(self.store):
            e_store = self.epilogue.tma_store(x.exps)
        given = self.tiled_mma(self.m_halves), a_loads, b_load, e_store, self.rows_of(x)
        self.kernel(*given, RowCount(x.count, x.selects), x.vocab_splits).launch(
            **self.launch_shape(x.clusters), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        a: Any,
        b: Any,
        e: Any,
        rows: Rows,
        row_count: RowCount,
        vocab_splits: Int32,
    ) -> None:
        """Assign warps to roles; a, b and e are (TMA atoms, coordinates, shared memory layout)."""
        config = self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (loads_a, g_a, a_layout), (load_b, g_b, b_layout), (store_e, g_e, e_layout) = a, b, e
        if warp == 0:
            for load in (*loads_a, load_b):
                cpasync.prefetch_descriptor(load)

        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * config.stages)
        s_a = smem.allocate_tensor(self.dtype, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(self.dtype, b_layout.outer, 1024, b_layout.inner)
        s_e = None
        if cutlass.const_expr(self.store):
            s_e = smem.allocate_tensor(self.epilogue.dtype, e_layout.outer, 1024, e_layout.inner)
        pipe = self.make_pipeline(barriers)
        most = (g_b.shape[0] + config.tile_n - 1) // config.tile_n
        if cutlass.const_expr(self.sums):
            most = rows.sums.shape[1] // config.partials_per_row
        splits = vocab_splits, most
        scheduler = make_tile_scheduler(config, self.tile[2], g_a, g_b, row_count, *splits)
        cute.arch.griddepcontrol_launch_dependents()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            if warp == 0:
                # of a loss target_logit comes between, so that h and w are older than the previous
                # kernel; one row block needs no semaphores
                if self.logits or not self.sums or scheduler.row_blocks > 1:
                    cute.arch.griddepcontrol_wait()
                a_operand, b_operand = (loads_a, g_a, s_a), (load_b, g_b, s_b)
                self.load(scheduler, pipe, a_operand, b_operand, rows.semaphores)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            self.consume(scheduler, pipe, tiled_mma, (s_a, s_b), (store_e, g_e, s_e), rows)

    @cute.jit
    def consume(
        self,
        scheduler: TileScheduler,
        pipe: Any,
        tiled_mma: cute.TiledMma,
        inputs: Any,
        e: Any,
        rows: Rows,
    ) -> None:
        """Consumer: run the MMAs of tile after tile and reduce or store their exponentials.

        `e` is (TMA atom, coordinates, shared memory) of stores.
        """
        raise NotImplementedError
