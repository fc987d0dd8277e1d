"""The operands of steps: parts of buffers as matrices, and factors of tokens."""

from collections.abc import Sequence

from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.kept_sums import Sums
from cutefce.ops.rows.scaling import Scaling


def rows_of(call: Call, s: Step, name: str, columns: int | None = None) -> Tensor:
    """Return the rows of a buffer of a chunk that a step has."""
    view = call.view(name, columns)
    return view[: s.rows[1] - s.rows[0]] if call.program.in_chunks else view


def states_of(call: Call, s: Step) -> Tensor:
    """Return the hidden states that a step reads."""
    return call.part(s.rows).h if s.states is None else rows_of(call, s, s.states)


def exps_of(call: Call, s: Step, *, whole: bool = False) -> Tensor:
    """Return the exponentials of a step's columns; `whole` ones with those beyond the classes."""
    assert s.exps is not None
    columns = s.columns[1] - s.columns[0]
    if whole:
        block = call.program.problem.block
        columns = min(round_up(columns, block), call.program.buffers[s.exps].columns)
    return rows_of(call, s, s.exps, columns)


def scale_of(call: Call) -> Tensor | None:
    """Return the factors of hidden states beside exponentials; None if these have them."""
    scaling: Scaling = call.values["scaling"]
    scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
    factor = call.values.get("known")
    return scale if scale is None or factor is None else scale * factor


def sums_of(call: Call, names: Sequence[str], low_bits: int | None = None) -> Sums:
    """Return sums of a buffer, or in the two pieces of which the second has their low bits.

    These are as many as those of sums over windows or of dW, or `low_bits`.
    """
    upper, *low = map(call.view, names)
    columns = call.inputs.h.shape[1] * (low_bits or call.program.low_bits) // 8
    return Sums(upper, low[0][:, :columns] if low else None)
