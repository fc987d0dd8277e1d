"""How a divergence would run, and the problem that it is planned for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.cute_kernels.problem import Problem
from cutefce.ops.divergence import checks as own_checks
from cutefce.ops.divergence.options import DivergenceTensors
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface import checks
from cutefce.ops.planning.divergence.planner import make_plan
from cutefce.ops.planning.divergence.problem import DivergencePlan, DivergenceProblem
from cutefce.ops.primitives.dispatch import planned_device
from cutefce.ops.primitives.portable_projection import is_dense


def plan_divergence(
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
        beta: the teacher's share of the JSD's mixture; None is 0.5.  A KL takes None.
        student_bias: (V,) of which only its gradient matters.
        teacher_bias: the same of the teacher.
        temperature: numbers or tensors, of which only the shape matters.
        reduction: "mean", "sum" or "none".
        ignore_index: None is -100.
        workspace: peak memory in bytes, "min", "max", or None for 2.5 GiB.
        group: process group over whose ranks the classes are sharded.
        shards: classes of every rank.

    More than eight parameters: they are arguments of the call.

    Returns:
        Tiles, kept tokens, and predicted memory (bytes) and time (seconds).

    Raises:
        TypeError, ValueError: as the call does, and for a target on `meta`.
    """
    given = student_input, student_weight, teacher_input, teacher_weight
    biases = student_bias, teacher_bias
    heads, name = own_checks.checked_heads(given, target, biases, group, shards)
    form = own_checks.form(divergence, own_checks.checked_share(divergence, beta))
    tensors = DivergenceTensors(*biases, *own_checks.temperatures(temperature, heads[0][0]), None)
    ignored = own_checks.checked_ignore_index(reduction, ignore_index)
    budget = checks.workspace_bytes(workspace)
    flat = [(h.reshape(-1, h.shape[-1]), w) for h, w in heads]
    counted = len(flat[0][0])
    if target is not None:
        if target.is_meta:
            raise ValueError("target: got one on meta, which has no values, expected None")
        counts = target if target.dtype == torch.bool else target != ignored
        counted = int(counts.sum())
    wanted = [own_checks.gradients(*head, bias) for head, bias in zip(heads, biases, strict=True)]
    problem = problem_of(
        flat,
        wanted,
        counted,
        scales_rows=reduction == "none" or tensors.differ_by_token,
        is_sharded=name is not None,
        is_mixture=form == "jsd",
    )
    return make_plan(problem, budget)


def problem_of(
    heads: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[Sequence[bool]],
    counted: int,
    *,
    scales_rows: bool,
    is_sharded: bool,
    is_mixture: bool,
) -> DivergenceProblem:
    """Return the problem of a call with h (N, D) and w (V, D) of student and teacher.

    `counted` tokens count, `gradients` of hidden states, weight and bias of each side are computed;
    the others are those of `DivergenceProblem`.
    """
    problems, copied = [], 0
    for (h, w), (hidden, weight, bias) in zip(heads, gradients, strict=True):
        dtype = dtype_name(h.dtype)
        sizes = counted, h.shape[1], len(w), dtype, planned_device(h)
        problems.append(Problem(*sizes, hidden, weight, grad_bias=bias))
        given = (h, w) if counted == len(h) else (w,)
        copied += sum(x.numel() * x.element_size() for x in given if not is_dense(x))
    student, teacher = problems
    tokens = len(heads[0][0])
    return DivergenceProblem(student, teacher, tokens, copied, scales_rows, is_sharded, is_mixture)
