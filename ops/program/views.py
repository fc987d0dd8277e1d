"""The operands of steps: parts of buffers as matrices, and factors of tokens."""

from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.scaling import Scaling


def rows_of(call: Call, s: Step, name: str, columns: int | None = None) -> Tensor:
    """Return the rows of a buffer of a chunk that a step has."""
    view = call.view(name, columns)
    return view[: s.rows[1] - s.rows[0]] if call.program.in_forward else view


def states_of(call: Call, s: Step) -> Tensor:
    """Return the hidden states that a step reads."""
    return call.part(s.rows).h if s.states is None else rows_of(call, s, s.states)


def exps_of(call: Call, s: Step, *, whole: bool = False) -> Tensor:
    """Return the exponentials of a step's columns; `whole` ones with those beyond the classes."""
    assert s.exps is not None
    columns = s.columns[1] - s.columns[0]
    if whole:
        block = call.inputs.primitives.config.reference_block
        columns = min(round_up(columns, block), call.program.buffers[s.exps].columns)
    return rows_of(call, s, s.exps, columns)


def scale_of(call: Call) -> Tensor | None:
    """Return the factors of hidden states beside exponentials; None if these have them."""
    scaling: Scaling = call.values["scaling"]
    scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
    factor = call.values.get("known")
    return scale if scale is None or factor is None else scale * factor


def low_of(call: Call, name: str) -> Tensor:
    """Return the bytes of low bits that are used, of sums over windows or of dW."""
    low = call.view(name)
    return low[:, : call.inputs.h.shape[1] * call.program.low_bits // 8]
