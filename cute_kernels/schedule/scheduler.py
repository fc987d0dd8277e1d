"""How a thread block walks the tiles of a bᵀ, in the order of `tile_order`."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule import order
from cutefce.cute_kernels.workspace import Semaphore


class Walk(NamedTuple):
    """What every role must agree on, so that they meet at the same tiles."""

    row_blocks: Int32
    windows: Int32
    tiles: Int32
    """Tiles of columns."""
    steps: Int32
    """Stages of one tile."""
    cuts: Any
    """Pieces of each unit of the last round; None: units are not cut."""
    cluster: Int32
    clusters: Int32
    rank: Int32
    """Thread block within the cluster."""
    rows: Int32
    columns: Int32


class Piece(NamedTuple):
    """A unit, or a piece of it."""

    unit: Int32
    """Its number."""
    first: Int32
    """Its first stage."""
    end: Int32
    earlier: Int32
    """Pieces of the unit whose results are added before this one's."""
    later: Int32


@cute.jit
def make_walk(
    config: GemmConfig, step: int, a: cute.Tensor, b: cute.Tensor, windows: Any, cuts: Any = None
) -> Walk:
    """Return the walk over a (M, K) and b (N, K), `step` of K a stage.

    `windows` are those of each row block; None: every tile is one.
    """
    (rows, inner), columns = a.shape, b.shape[0]
    tiles = (columns + config.tile_n - 1) // config.tile_n
    return Walk(
        row_blocks=(rows + config.rows - 1) // config.rows,
        windows=tiles if windows is None else windows,
        tiles=tiles,
        steps=(inner + step - 1) // step,
        cuts=cuts,
        cluster=cute.arch.block_idx()[0] // config.cluster,
        clusters=cute.arch.grid_dim()[0] // config.cluster,
        rank=cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()),
        rows=rows,
        columns=columns,
    )


@cute.jit
def indices(walk: Walk) -> Int32:
    """Return the end of the indices that are walked."""
    units = walk.row_blocks * walk.windows
    if cutlass.const_expr(walk.cuts is not None):
        units += units % walk.clusters * (walk.cuts - 1)
    return units


@cute.jit
def piece(walk: Walk, index: Int32) -> Any:
    """Return the `Piece` of an index."""
    number, cut, cuts = index, Int32(0), Int32(1)
    if cutlass.const_expr(walk.cuts is not None):
        units = walk.row_blocks * walk.windows
        if index >= units - units % walk.clusters:
            number, cut = order.piece(index, units, walk.clusters)
            cuts = walk.cuts
    first, end = walk.steps * cut // cuts, walk.steps * (cut + 1) // cuts
    return Piece(number, first, end, cut, cuts - 1 - cut)


@cute.jit
def unit(walk: Walk, group: int, notes: Any, number: Int32) -> Any:
    """Return row block, window and end of the tiles of a unit; 0, none, if `notes` leave it out."""
    row, window = order.unit(number, walk.row_blocks, walk.windows, group, cutlass.min)
    end = walk.tiles
    if cutlass.const_expr(notes is not None):
        if notes[Semaphore.REPAIR_FLAGS + row] == 0:
            end = Int32(0)
    return row, window, end
