"""Steps of dX, and what is kept of its sums Σ_v e_iv w_v until the factors of tokens are known.

Sums are float32, twice a 16-bit dX; or packed in 20 bits, over many windows in 24: 16 in the memory
of dX, or in as much memory, and the others beside it.  Each window adds its products in float32
and rounds to nearest; dX is rounded once more, at the end.

A token's sums over all classes are final after its chunk, but the upstream gradient multiplies
them.  They are packed in 20 bits: the relative error is at most 2⁻¹³, 16 times smaller than that of
the rounding of dX.  Where the upstream gradient is known before the backward, dX itself is kept.

Where kernels select rows, sums are in the order of the selection.  What a chunk keeps of them in
fewer bits, or of dX, is in the call's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.primitives.select_rows import restore_rows, row_range
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.rows.coefficients import RankOne, RowCoefficients
from cutefce.ops.rows.packed_sums import Sums


def gemm_hidden(call: Call, s: Step) -> None:
    """Write or add a window's part of dX's sums."""
    x, exps = call.part(s.rows), call.exps(s)
    primitives, w = x.primitives, row_range(x.w, *s.columns)
    sums = Sums(call.rows(s, s.writes[0])) if len(s.writes) == 1 else call.sums(s.writes)
    selection = call.values.pop("far rows") if s.repairs else x.targets.selection
    more: Any = {"accumulate": s.adds, "selection": selection}
    more["in_windows"] = s.columns != (0, x.w.shape[0]) and not call.program.in_chunks
    primitives.add_hidden(sums, exps, w, **more)


def rescale(call: Call, s: Step) -> None:
    """Make sums relative to the references of probabilities."""
    sums, scale = call.sums(s.writes), call.values["scaling"].relative
    if sums.low is None:
        sums.upper.mul_(scale[:, None])
    else:
        call.inputs.primitives.scale_packed_rows(sums, scale)


def keep_hidden(call: Call, s: Step) -> None:
    """Keep the sums of a chunk; or its rows of dX, for a known upstream gradient."""
    x, rows, stats = call.part(s.rows), slice(*s.rows), call.values["stats"]
    products, order, kept = call.rows(s, "sums"), x.targets.order, _kept(call, s.writes)
    own = kept.rows(rows) if order is None else kept
    if s.final:
        factor = call.inputs.targets.tensors.grad_output
        assert factor is not None
        coefficients = call.values["scaling"].dx.times(factor)
        finish_dx(x, own.upper, Sums(products), coefficients, order)
    elif kept.low is not None:
        x.primitives.pack_sums(own, products, x.w, x.targets, stats, order)
    else:
        finish_dx(x, products, Sums(products), RowCoefficients.of_sums(stats, x.targets))
        kept.upper[rows] = products


def finish_hidden(call: Call, s: Step) -> None:
    """Round dX."""
    if call.program.in_chunks:
        finish_chunks(call, s)
        return
    x, name = call.inputs, "sums" if "sums" in s.reads else "dx"
    sums = call.sums((name,) if s.low is None else (name, s.low))
    finish_dx(x, call.view("dx"), sums, call.values["scaling"].dx, x.targets.order)


def finish_chunks(call: Call, s: Step) -> None:
    """Make dX of what chunks have kept, in its memory.

    If the upstream gradient was known, the one of the backward only makes dX NaN where it is NaN.
    """
    x, out = call.inputs, call.view("dx")
    sums = _kept(call, ("dx",) if s.low is None else ("dx", s.low))
    stats, upstream, selection = (call.values[name] for name in ("stats", "upstream", "selection"))
    primitives, targets, order = x.primitives, x.targets, None
    if selection is not None and selection.is_on_device:
        order = selection.order
    rounded = call.program.problem.adds_in_forward
    is_placed = order is not None and (rounded or sums.low is not None)
    if rounded:
        upstream = torch.where(upstream.isnan(), upstream, 1)
        factor = torch.where(targets.active, upstream.to(stats.rows.dtype), 0)
        primitives.scale_rows(out, out, factor if order is None else selection.restore(factor))
    else:
        dx = primitives.scaling(x.h.dtype, targets, stats, upstream, in_reference=False).dx
        # what the target has beyond the part that the sums contain
        dx = replace(dx, target=dx.target + dx.scale * stats.sum_exp_others)
        finish_dx(x, out, sums, dx, order if is_placed else None)
    call.values["dx"] = restore_rows(None if is_placed else selection, out)


def _kept(call: Call, names: Sequence[str]) -> Sums:
    """Return what chunks keep: dX, or its sums, in fewer bits or not."""
    return call.sums(names, call.program.problem.few_low_bits)


def finish_dx(
    inputs: LossInputs,
    out: Tensor,
    sums: Sums,
    coefficients: RowCoefficients,
    order: Tensor | None = None,
) -> None:
    """Write dX (N, D) of its `sums` to `out`, where these may be.

    With `order` (N,), row i of `sums` becomes row order_i of `out`.  Packed sums in `out` are in
    these places, too.
    """
    every = class_term(inputs, coefficients)
    rows = inputs.w, inputs.targets, coefficients, every, order
    inputs.primitives.finish_dx(Sums(out), sums, *rows)


def class_term(inputs: LossInputs, coefficients: RowCoefficients) -> RankOne | None:
    """Return the class row's part of dX (N, D), None without label smoothing."""
    if coefficients.every is None or inputs.class_row is None:
        return None
    return RankOne(coefficients.every, inputs.class_row)
