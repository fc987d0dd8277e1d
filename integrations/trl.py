"""TRL: the losses of its trainers, without logits.

    import cutefce.integrations.trl

    cutefce.integrations.trl.enable()  # before or after the trainer is made
    cutefce.integrations.trl.enable_gkd(model, teacher)  # for GKDTrainer, before it is made

SFT, DPO, KTO, GRPO and RLOO take their values from `linear_log_probs`, distillation and GKD from
`linear_divergence`.  TRL's own function still runs for what cutefce does not have: the mean of
capped logits, the gradient of their entropy, and a weight that ZeRO-3 partitions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cutefce.integrations.deferral.divergence import divergence_of
from cutefce.integrations.deferral.model import defer
from cutefce.integrations.options import loss_options, workspace_options
from cutefce.integrations.support import hooks
from cutefce.ops.divergence.api import linear_divergence
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "trl 1.16.0"
LOG_PROBS = "trl.kernels:ChunkedLogProbFunction.apply"
DISTILLATION = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
GKD = "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss"
OUTPUTS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_p_squared",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
"""TRL's names of the values of a token, and those of `linear_log_probs`."""

Values = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""(N,) each: log-probabilities, then what `OUTPUTS` names; None if not asked for."""


def enable() -> None:
    """Replace what TRL's trainers compute of hidden states and the weight of the head.

    Raises:
        ImportError: if TRL is not installed.
        RuntimeError: if a function of TRL has other parameters.
    """
    hooks.replace(LOG_PROBS, log_probs, tested=TESTED)
    hooks.replace(DISTILLATION, divergence_loss, tested=TESTED)


def enable_gkd(model: nn.Module, teacher: nn.Module) -> None:
    """Defer the logits of a student and its teacher, and replace the loss of `GKDTrainer` of them.

    Args:
        model: the student, as for `cutefce.defer`.
        teacher: the teacher, the same.

    Raises:
        ImportError: if TRL is not installed.
        TypeError: if a head is not a plain `nn.Linear`.
        RuntimeError: if a head is deferred already, or TRL's function has other parameters.
    """
    defer(model, **workspace_options())
    defer(teacher, evaluation=True)
    hooks.replace(GKD, generalized_jsd_loss, tested=TESTED)


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    chunk_size: int,
    final_logit_softcapping: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (*OUTPUTS,),
    *,
    own: Callable[..., Values],
) -> Values:
    """Return log-probabilities (N,) of targets (N,), and the values that `outputs` names.

    More than eight parameters: they are TRL's, and TRL's own function, `own`.
    """
    if hasattr(weight, "ds_id"):
        raise hooks.NotServedError
    w = weight
    if not torch.is_autocast_enabled(hidden.device.type):
        w = w.to(torch.promote_types(w.dtype, hidden.dtype))  # cast_lm_head_to_fp32
    names = {given: name for given, name in OUTPUTS.items() if given in outputs}
    is_capped = final_logit_softcapping is not None
    has_own_mean = is_capped and names.pop("mean_logits", None) is not None
    found = linear_log_probs(
        hidden,
        w,
        targets,
        outputs=(*names.values(),),
        linear_bias=None if bias is None else bias * logit_scale,  # TRL scales it too
        logit_scale=logit_scale,
        softcap=final_logit_softcapping,
        temperature=temperature,
        **loss_options(),
    )
    entropy, mean, squares = found.entropy, found.mean_logit, found.sum_p_squared
    if has_own_mean:
        with torch.no_grad():
            mean = own(outputs=("mean_logits",))[3]
    if is_capped and entropy is not None:
        # which holds no hidden states and no weight, as what is saved for a backward does
        of_trl: Callable[..., Values] = inspect.unwrap(own)
        rest = targets, temperature, chunk_size, final_logit_softcapping, logit_scale, ("entropy",)
        entropy = EntropyOfOwn.apply(  # type: ignore[no-untyped-call]
            lambda *leaves: of_trl(*leaves, *rest)[1], entropy.detach(), hidden, weight, bias
        )
    return found.log_probs, entropy, None if squares is None else squares.log(), mean, found.is_top1


class EntropyOfOwn(torch.autograd.Function):
    """Entropies (N,) whose gradient is that of another function of the operands.

    It runs in the backward, if a gradient arrives there.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], entropy: Tensor, *operands: Tensor | None
    ) -> Tensor:
        """Return `entropy`."""
        device = entropy.device.type
        ctx.function = function
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(*operands)
        return entropy.view_as(entropy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the operands."""
        operands = [None if x is None else x.detach() for x in ctx.saved_tensors]
        asked = ctx.needs_input_grad[2:]
        pairs = zip(operands, asked, strict=True)
        needed = [x.requires_grad_() for x, is_asked in pairs if is_asked and x is not None]
        device, dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled):
            entropy = ctx.function(*operands)
        found = iter(torch.autograd.grad(entropy, needed, gradient))
        return None, None, *(next(found) if is_asked else None for is_asked in asked)


def divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | float | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss (), the sum () of the student's entropies and the number () of tokens.

    More than eight parameters: they are TRL's, whose own function still serves weights that ZeRO-3
    partitions.

    Args:
        student_hidden_states: (B, T, D_s).
        teacher_hidden_states: (B, T, D_t).
        student_lm_head_weight: (V, D_s), plain or a DTensor.
        teacher_lm_head_weight: (V, D_t), the same.
        completion_mask: (B, T), not 0 where a token counts.
        beta: the teacher's share of the mixture; 0 is the forward KL, 1 the reverse KL.
        num_items_in_batch: divisor of the sum, None for the number of tokens that count.
        student_lm_head_bias: (V,) or None.
        teacher_lm_head_bias: the same.
        student_logit_scale: factor of the products and of the bias.
        teacher_logit_scale: the same.
        student_final_logit_softcapping: bound of the logits, or None.
        teacher_final_logit_softcapping: the same.
        temperature: divisor of the logits of both.
    """
    states = student_hidden_states, teacher_hidden_states
    weights = student_lm_head_weight, teacher_lm_head_weight
    biases = student_lm_head_bias, teacher_lm_head_bias
    scales = student_logit_scale, teacher_logit_scale
    caps = student_final_logit_softcapping, teacher_final_logit_softcapping
    if any(hasattr(w, "ds_id") for w in weights):
        raise hooks.NotServedError
    student, teacher = zip(states, weights, biases, scales, strict=True)
    h, w, bias = _operands(*student)
    with torch.no_grad():
        teacher_operands = _operands(*teacher)
    counts = completion_mask != 0
    loss = linear_divergence(
        h,
        w,
        *teacher_operands[:2],
        counts,
        divergence="jsd",
        beta=beta,
        student_bias=bias,
        teacher_bias=teacher_operands[2],
        logit_scale=scales,
        softcap=caps,
        temperature=temperature,
        denominator=num_items_in_batch,
        **workspace_options(),
    )
    with torch.no_grad():
        entropy = linear_log_probs(
            h,
            w,
            counts.long() - 1,
            outputs=("entropy",),
            linear_bias=bias,
            logit_scale=scales[0],
            softcap=caps[0],
            temperature=temperature,
            ignore_index=-1,
            **workspace_options(),
        ).entropy
    assert entropy is not None
    return loss, entropy.sum(), counts.sum()


def _operands(
    h: Tensor, w: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden states, whole weight and scaled bias, as TRL takes them."""
    w = w.full_tensor() if isinstance(w, DTensor) else w
    bias = bias.full_tensor() if isinstance(bias, DTensor) else bias
    if not torch.is_autocast_enabled(h.device.type):
        w = w.to(h.dtype)
    return h, w, None if bias is None else bias * scale


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """Return the loss () of deferred logits (B, T, V), of the tokens whose label is not -100.

    The parameters are TRL's, whose own function serves logits that are not deferred on both sides,
    and other reductions than "batchmean" and "sum".
    """
    options: dict[str, Any] = {"divergence": "jsd", "beta": beta, "temperature": temperature}
    if num_items_in_batch is not None:
        options["denominator"] = num_items_in_batch
    elif reduction == "sum":
        options["reduction"] = "sum"
    elif reduction != "batchmean" or labels is None:
        raise hooks.NotServedError
    loss = divergence_of(student_logits, teacher_logits, labels, **options)
    if loss is None:
        raise hooks.NotServedError
    return loss
