"""Outputs of steps: losses, exponentials and gradients, computed in every way there is."""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS, can_keep
from cutefce.ops.budgets import DEFAULT
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.operators.plans import option_fields
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.primitives.select_rows import restore_rows, select_on_device
from cutefce.ops.program import calls as programs
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.problem import LossProblem, Upstream
from cutefce.ops.rows import targets as rows
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.statistics import RowStats
from cutefce.ops.rows.targets import Targets

IGNORED = -100


@dataclass(frozen=True)
class Way:
    """One way to compute losses and gradients: others launch other kernels."""

    reduction: str = "none"
    gradients: tuple[bool, bool] = (True, True)
    """Whether dX and dW are computed."""
    windows: int = 1
    """Windows of equal width, but for the last one."""
    stored: int = 0
    """The first ones, whose exponentials the forward stores, if the dtype can and they fit."""
    chunks: int = 0
    """Chunks of tokens of which the forward computes the gradients; 0: the backward computes them.
    """
    low_bits: int = 0
    """Bits of packed sums beside 16."""
    wide: bool = False
    """Whether dW is returned in the dtype of sums."""
    ignores: bool = False
    """Whether every third token is ignored too, so that kernels select the others."""
    clears: bool = False
    """Whether they clear rows that do not count, as for the gradient of a bias."""

    def __str__(self) -> str:
        """Return the end of the names of its outputs: what differs from the defaults."""
        values = asdict(self).items()
        return "".join(f", {name} {x}" for name, x in values if x != getattr(Way, name))


NONE = False, False
FORWARDS = Way(gradients=NONE), Way(gradients=NONE, ignores=True)
"""Losses without gradients."""
STEPS = (
    Way(stored=1),
    Way("sum"),
    Way(wide=True),
    Way(stored=1, ignores=True),
    Way(stored=1, ignores=True, clears=True),
    *(Way("sum", chunks=2, low_bits=n) for n in LOW_BITS),
    Way("sum", chunks=2, low_bits=LOW_BITS[-1], wide=True),
    Way("sum", (True, False), windows=3, chunks=2, low_bits=LOW_BITS[0], ignores=True),
    *(Way("sum", windows=3, stored=1, low_bits=n, ignores=True) for n in LOW_BITS),
)
"""Exact gradients.  Windows after stored ones are computed again, as probabilities."""


def make_targets(case: Case, reduction: str = "none") -> Targets:
    """Return the targets of a case, with the reduction of their losses."""
    return rows.make_targets(case.y, case.problem.vocab, LossOptions(reduction), TensorOptions())


def prepared(
    case: Case, primitives: Primitives, way: Way, targets: Targets | None = None
) -> tuple[LossInputs, Plan, RowSelection | None]:
    """Return the operands and the plan of a case, and which rows kernels select.

    The targets are those of the case without options, if they are not given.
    """
    p, selection = case.problem, None
    block = defaults.widest_window(p).reference_block
    chunk = ceil_div(p.tokens, way.chunks) if way.chunks else p.tokens
    window = round_up(ceil_div(p.vocab, way.windows), block)
    affordable = DEFAULT // (p.tokens * p.item_bytes) // block * block
    kept = min(window * way.stored, affordable) if can_keep(p.dtype) else 0
    if targets is None:
        targets = make_targets(case, way.reduction)
    if way.ignores:
        y = _partly_ignored(case)
        if isinstance(primitives, CuteProjection):
            selection = select_on_device(p.arch or "", y, IGNORED, chunk)
            y = selection.targets
        targets = Targets(y, p.vocab, targets.options)
        targets.selection = selection
    if way.clears and isinstance(primitives, CuteProjection):
        primitives = copy.copy(primitives)
        primitives.clears = True
    h, w = primitives.prepare(case.h, case.w)
    inputs = LossInputs(primitives, h, w, targets)
    grad_hidden, grad_weight = way.gradients
    problem = LossProblem(
        **asdict(replace(p, grad_hidden=grad_hidden, grad_weight=grad_weight)),
        upstream=Upstream.SCALAR if targets.options.is_scalar else Upstream.ROWS,
        stores=can_keep(p.dtype),
        selects=selection is not None,
        wide_grad_weight=way.wide,
        **option_fields(targets.options, targets.tensors, p.arch is not None),
    )
    layout = Layout(chunk, window, kept, 0, way.low_bits, in_chunks=way.chunks > 0)
    return inputs, Plan(problem, layout), selection


def run(
    inputs: LossInputs, plan: Plan, selection: RowSelection | None, upstream: Tensor
) -> tuple[Tensor, RowStats, Tensor | None, Tensor | None]:
    """Return losses () or (N,), statistics, dX and dW, as far as they are computed.

    The first operands are those of `prepared`; `upstream` is (N,), and 1 for reduced losses.
    """
    loss, stats, saved = programs.forward(inputs, plan)
    if inputs.targets.options.is_scalar:
        upstream = upstream.new_ones(())
    elif selection is not None:
        loss, upstream = selection.restore(loss), selection.take(upstream)
    if not plan.problem.needs_gradients:
        return loss, stats, None, None
    of_chunks = selection if plan.layout.in_chunks else None
    if of_chunks is not None:
        inputs.targets.selection = None  # all rows of the sums are defined
    dx, dw, _ = programs.backward(plan, saved.by_home, inputs, upstream, stats, of_chunks)
    return loss, stats, dx, dw


def way_outputs(
    case: Case, primitives: Primitives, ways: Sequence[Way]
) -> dict[str, CheckedOutput]:
    """Return losses, row sums and gradients of a case, computed in several ways, by name."""
    results: dict[str, CheckedOutput] = {}
    for way in ways:
        if way.low_bits and not can_keep(case.problem.dtype):
            continue  # no call keeps sums in a dtype whose exponentials are not stored
        loss, stats, dx, dw = run(*prepared(case, primitives, way), case.upstream)
        results[f"loss{way}"] = CheckedOutput(loss.view(-1), 1)
        if not way.ignores:  # whose order is that of the call
            share = stats.sum_exp_others.double() / stats.sum_exp
            results[f"sum of the other exponentials{way}"] = CheckedOutput(share, 1)
        results |= gradients(str(way), dx, dw, case.h.dtype)
    return results


def gradients(
    suffix: str, dx: Tensor | None, dw: Tensor | None, dtype: torch.dtype
) -> dict[str, CheckedOutput]:
    """Return the gradients that are computed, rounded to `dtype`.

    Roundings are those of the exponentials, of the scaled hidden states and of the result.
    """
    floor, results = torch.finfo(dtype).smallest_normal, {}
    for name, x in (("dX", dx), ("dW", dw)):
        if x is not None:
            results[name + suffix] = CheckedOutput(x.to(dtype), 3, floor)
    return results


def partial_outputs(case: Case, primitives: Primitives) -> dict[str, CheckedOutput]:
    """Return what a rank adds to dX, of known sums, and rows that kernels moved to their tokens."""
    inputs, _, selection = prepared(case, primitives, Way(ignores=True))
    sums, upstream = case.h.to(case.upstream.dtype), case.upstream
    if selection is not None:
        sums, upstream = sums.index_select(0, selection.order), selection.take(upstream)
    partial, coefficients = torch.empty_like(sums), RowCoefficients(upstream, upstream)
    primitives.finish_dx(Sums(partial), Sums(sums), inputs.w, inputs.targets, coefficients)
    counts = (_partly_ignored(case) != IGNORED)[:, None]
    results = {}
    for name, x in (("partial dX of a rank", partial), ("moved rows", partial.to(case.h.dtype))):
        rows = torch.where(counts, restore_rows(selection, x), 0)
        results[name] = CheckedOutput(rows, 1)
    return results


def _partly_ignored(case: Case) -> Tensor:
    """Return the targets (N,) of a case, of which every third token is ignored too."""
    is_third = torch.arange(case.problem.tokens, device=case.y.device) % 3 == 0
    return torch.where(is_third, IGNORED, case.y)
