"""The steps of a divergence, names of what they read and write, and what they take.

What they take is bytes beside their buffers, and time.
"""

from enum import Enum
from math import ceil

from cutefce.cute_kernels.schedule.order import PARTIAL_BYTES
from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.ops.divergence.options import FIRST, SIDES
from cutefce.ops.divergence.problem import DivergenceProblem
from cutefce.ops.program.predicted_time import Device, product_seconds
from cutefce.ops.program.step_memory import upcast_bytes
from cutefce.ops.program.steps import Home, Kind, Program, Step
from cutefce.ops.rows.blocks import row_block_bytes

DX, DW = (Home.DX, Home.SECOND_DX), (Home.DW, Home.SECOND_DW)
SUMS, STATS = 4, 7
"""Statistics of a token, of which the first ones make the log-sum-exps of both sides."""
KL_BLOCKS, FIRST_BLOCKS = 6.25, 3.25
"""Blocks of rows that an element-wise step holds at a time on a CPU: of a KL divergence, less for
factors of the side that it averages over.  A GPU fuses the steps."""
BLOCKS = {"jsd": (10.5, 8.5), "tv": (6.25, 2.0)}
"""Those of other divergences, in the forward and in the backward."""
SUMS_PART = 96
"""Logits for a sum of them, at least: a kernel has two for its tiles of 192 classes."""


class TileKind(Enum):
    """What a step does beside the `Kind` of losses; its rows are tokens, its columns are classes.

    Logits are a tile of both sides' in scratch.  To other steps, e are factors of trained sides.
    """

    __hash__ = object.__hash__

    ROWS = "all logits of tokens; statistics from these, and the factors that are kept"
    ADD_EXPS = "logits of some classes; their exponentials, added to those of log-sum-exps"
    FINISH_LSES = "log-sum-exps of all classes, those of other ranks too"
    ADD_TERMS = "logits of some classes; their terms, added to the divergences"
    COPY = "factors of kept tokens, next to those that are computed again"
    FACTORS = "logits of some classes; factors of the trained sides"


TILES = TileKind.ROWS, TileKind.ADD_EXPS, TileKind.ADD_TERMS, TileKind.FACTORS
"""Steps that make a tile of logits, which is what they write first."""


def side_of(name: str) -> int:
    """Return the side that a buffer is of."""
    return SIDES.index(name.split()[0])


def scratch_bytes(p: DivergenceProblem, step: Step) -> int:
    """Return the bytes that a step takes while it runs, beside its buffers."""
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.kind in TILES:
        partial = min(rows * columns * p.sums // SUMS_PART, 2 * PARTIAL_BYTES)
        if p.student.device != "cpu":
            exchanged = rows * DivergenceRowsSpec.EXCHANGE * p.sums * (step.kind is TileKind.ROWS)
            return 2 * partial + exchanged
        width = columns * p.sums
        block = min(rows, max(row_block_bytes("cpu") // width, 1)) * width
        products = (upcast_bytes(side, rows, side.hidden, columns) for side in p.sides)
        return max(ceil(_blocks(p, step) * block), *products)
    match step.kind:
        case Kind.GEMM_HIDDEN:
            side = p.sides[side_of(step.writes[0])]
            return upcast_bytes(side, rows, columns, side.hidden)
        case Kind.GEMM_WEIGHT:
            side = p.sides[side_of(step.writes[0])]
            return upcast_bytes(side, columns, rows, side.hidden)
        case Kind.BIAS:
            return 2 * columns * p.sums + row_block_bytes("cpu") * p.student.accumulates_wider
        case Kind.FINISH_HIDDEN if p.selects or p.sharded:
            side = p.sides[side_of(step.writes[0])]
            return rows * side.hidden * (side.item_bytes + 2 * p.sums * p.sharded)
    return 0


def _blocks(p: DivergenceProblem, step: Step) -> float:
    """Return the blocks of rows that the element-wise part of a step holds at a time on a CPU."""
    is_factors = step.kind is TileKind.FACTORS
    if p.divergence in BLOCKS:
        return BLOCKS[p.divergence][is_factors]
    is_first = is_factors and p.trained == [FIRST[p.divergence]]
    return FIRST_BLOCKS if is_first else KL_BLOCKS


def seconds(program: Program, device: Device) -> float:
    """Return the predicted time of forward and backward."""
    return sum(step.times * _seconds(program, step, device) for step in program.steps())


def _seconds(program: Program, step: Step, device: Device) -> float:
    p: DivergenceProblem = program.problem
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.kind in TILES:
        is_stored = step.kind in (TileKind.ROWS, TileKind.FACTORS) and step.writes[-1] != "stats"
        moved = rows * columns * (2 * p.sums + p.factor_bytes * is_stored)
        sides = ((side.hidden, side.item_bytes) for side in p.sides)
        products = sum(product_seconds(device, rows, columns, *side) for side in sides)
        return products + device.launch + moved / device.bytes
    moved = 0
    match step.kind:
        case Kind.GEMM_HIDDEN | Kind.GEMM_WEIGHT:
            side = p.sides[side_of(step.writes[0])]
            if step.kind is Kind.GEMM_HIDDEN:
                moved = (1 + step.adds) * rows * side.hidden * p.sums
            elif len(step.writes) > 1:
                moved = 3 * columns * side.hidden * p.sums
            product = product_seconds(device, rows, columns, side.hidden, side.item_bytes)
            return product + moved / device.bytes
        case TileKind.COPY:
            moved = 2 * rows * columns * p.factor_bytes
    return device.launch + moved / device.bytes
