"""The public calls, `linear_divergence`, distillation without logits, and `plan_divergence`."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.divergence import operators  # noqa: F401  (registers)
from cutefce.ops.divergence.checks import checked_call
from cutefce.ops.divergence.options import RECORDS
from cutefce.ops.divergence.plan import DivergencePlan, make_plan, problem_of
from cutefce.ops.interface.checks import check_transform
from cutefce.ops.interface.public_function import runs


class DivergenceOutput(NamedTuple):
    """The results of `linear_divergence` with `return_overlap`."""

    loss: Tensor
    """() or, with reduction "none", (...)"""
    overlap: Tensor
    """(...) Σ_v min(p_v, q_v) of each token, without gradient; 0 if ignored."""


def _divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    **given: Any,
) -> Tensor | DivergenceOutput:
    """Return what `linear_divergence` returns; `given` are its other arguments."""
    check_transform("linear_divergence")
    sides = student_input, student_weight, teacher_input, teacher_weight
    call = checked_call(sides, target, given)
    loss, stats = torch.ops.cutefce.divergence(
        *(x for head in call.heads for x in head),
        call.target,
        **call.arguments,
    )
    result: Tensor = loss.reshape(call.tokens) if loss.ndim else loss
    if not given.get("return_overlap", False):
        return result
    overlap = (1 - stats[-1]).clamp(min=0)
    if call.target is not None:
        overlap = overlap.masked_fill(call.target == call.arguments["ignore_index"], 0)
    return DivergenceOutput(result, overlap.reshape(call.tokens))


@overload
def linear_divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: Any = 1.0,
    softcap: Any = None,
    temperature: Any = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = None,
    denominator: Tensor | float | None = None,
    return_overlap: Literal[False] = False,
    workspace: int | str | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
) -> Tensor: ...


@overload
def linear_divergence(
    *arguments: Any, return_overlap: bool, **options: Any
) -> DivergenceOutput: ...


@runs(_divergence)  # type: ignore[misc]
def linear_divergence(  # type: ignore[empty-body]
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: Any = 1.0,
    softcap: Any = None,
    temperature: Any = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = None,
    denominator: Tensor | float | None = None,
    return_overlap: bool = False,
    workspace: int | str | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
) -> Tensor | DivergenceOutput:
    """Divergence of the distributions of a student and a teacher, without the logits of either.

    The logits of each side are softcap(logit_scale * input @ weight.T + bias) / temperature, and
    their softmax is p for the student and q for the teacher.  Of a token,

        "forward_kl"    KL(q || p) = Σ_v q_v (log q_v - log p_v)
        "reverse_kl"    KL(p || q)
        "jsd"           beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p
        "tv"            total variation, Σ_v |p_v - q_v| / 2 = 1 - Σ_v min(p_v, q_v)

    and a JSD with beta 0 is the forward KL, with beta 1 the reverse KL, as in TRL and Liger, whose
    limit for small beta is beta times the forward KL all the same.  Nothing is multiplied by the
    temperature's square.  Each tensor that requires grad has a gradient; one of a frozen teacher,
    which does not, costs nothing.

    Args:
        student_input: (..., D_s) hidden states, bfloat16, float16, float32 or float64.
        student_weight: (V, D_s), of their dtype and device.
        teacher_input: (..., D_t) hidden states of the same tokens; D_t and the dtype may differ,
            but for float64.
        teacher_weight: (V, D_t), of their dtype and device.
        target: (...) integers, `ignore_index` for a token that does not count, whose divergence
            and gradients are 0 and whose hidden states may be anything; other values are not
            looked at.  Booleans are a mask of the tokens that count; a mask of integers would be
            labels.  None if all do.
        divergence: which one.
        beta: the teacher's share of the JSD's mixture, from 0 to 1; None is 0.5.  Others take None.
        student_bias: (V,) floating-point, added to the logits before the softcap.
        teacher_bias: the same of the teacher.
        logit_scale: factor of the products, not 0; a number, or a pair of student and teacher.
        softcap: bound c > 0 of the logits, c tanh(x / c), or None; one, or a pair.
        temperature: divisor of the logits after the softcap, > 0; a number, () or (...), or a pair.
        reduction: "mean" over the tokens that count (0 if none does), "sum" or "none".
        ignore_index: None is -100.
        denominator: divisor of "mean", a number or a tensor () or (1,); with 0 the result is 0.
        return_overlap: whether to return a `DivergenceOutput` of the divergence, whichever it is,
            and the overlaps Σ_v min(p_v, q_v) of the tokens: how often speculative decoding accepts
            what a student proposes.  They have no gradient; what trains them is "tv".
        workspace: peak memory in bytes, beyond inputs and gradients, that the call may use for
            speed; "min", "max", or None for 2.25 GiB.
        group: process group whose ranks hold consecutive parts (V_k, D) of both weights, and of the
            biases, in rank order; all other arguments are the same on every rank.
        shards: V_k of every rank; None if they are equal.

    More than eight parameters: the options of `linear_cross_entropy`, for two sides.

    Returns:
        () or, with "none", (...): float32, or float64 for float64 inputs.  With `return_overlap`, a
        `DivergenceOutput`.

    Raises:
        TypeError, ValueError: naming the argument, what was got and what is expected.  With a
            group, on every rank.
        NotImplementedError: for second derivatives, forward mode and transforms of torch.func.
        RuntimeError: if another rank of the group failed, or made no such call in time.

    The formulas of the gradients are in docs/internals/divergence.md.
    """


def _plan_divergence(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    **given: Any,
) -> DivergencePlan:
    """Return what `plan_divergence` returns; `given` are its other arguments."""
    sides = student_input, student_weight, teacher_input, teacher_weight
    call = checked_call(sides, target, given)
    records: Any = (record.from_keywords(call.arguments) for record in RECORDS)
    options, sharding = records
    counted = len(call.heads[0][0])
    if call.target is not None:
        if call.target.is_meta:
            raise ValueError("target: got one on meta, which has no values, expected None")
        counted = int((call.target != options.ignore_index).sum())
    problem = problem_of(call.heads, counted, options, sharding)
    return make_plan(problem, options.workspace)


@runs(_plan_divergence, meets_ranks=False)
def plan_divergence(  # type: ignore[empty-body]
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    divergence: str = "forward_kl",
    beta: float | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: Any = 1.0,
    reduction: str = "mean",
    ignore_index: int | None = None,
    workspace: int | str | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
) -> DivergencePlan:
    """Return how `linear_divergence` would run with these arguments; print it to read it.

    Tensors on `meta` are planned for as on a GPU, as by `plan`; the plan of a divergence is the
    same for all GPUs.  Other arguments of the call change no plan.

    Args:
        student_input: (..., D_s) hidden states.  Set requires_grad on the tensors as for the call;
            under `torch.no_grad` the plan is that of a forward alone.
        student_weight: (V, D_s).
        teacher_input: (..., D_t).
        teacher_weight: (V, D_t).
        target: (...) that of the call, whose tokens that count are counted: a GPU is waited for.
            None if all count.
        divergence: which one, as for the call, and so are the other arguments.
        beta: the teacher's share of the JSD's mixture; None is 0.5.  Others take None.
        student_bias: (V,) of which only its gradient matters.
        teacher_bias: the same of the teacher.
        temperature: numbers or tensors, of which only the shape matters.
        reduction: "mean", "sum" or "none".
        ignore_index: None is -100.
        workspace: peak memory in bytes, "min", "max", or None for 2.25 GiB.
        group: process group over whose ranks the classes are sharded.
        shards: classes of every rank.

    More than eight parameters: they are arguments of the call.

    Returns:
        Tiles, kept tokens, and predicted memory (bytes) and time (seconds).

    Raises:
        TypeError, ValueError: as the call does, and for a target on `meta`.
    """
