"""TRL: the losses of its trainers, without logits.

    import cutefce.integrations.trl

    cutefce.integrations.trl.enable()  # before or after the trainer is made
    cutefce.integrations.trl.enable_gkd(model, teacher)  # for GKDTrainer, before it is made

SFT, DPO, KTO, GRPO and RLOO take their values from `linear_log_probs`, distillation and GKD from
`linear_divergence`.  TRL's own function still runs for what cutefce does not have: the mean of
capped logits, the gradient of their entropy, and a weight that ZeRO-3 partitions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.integrations.deferral.model import defer
from cutefce.integrations.distillation import trl as trl_distillation
from cutefce.integrations.gradients import loss_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "trl 1.16.0"
PATH = "trl.kernels:ChunkedLogProbFunction.apply"
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
        RuntimeError: if it is enabled already, or a function of TRL has other parameters.
    """
    hooks.replace(PATH, log_probs, tested=TESTED)
    hooks.replace(trl_distillation.PATH, trl_distillation.divergence_loss, tested=TESTED)


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
    defer(model)
    defer(teacher, evaluation=True)
    if not hooks.is_replaced(trl_distillation.GKD_PATH, TESTED):
        function = trl_distillation.generalized_jsd_loss
        hooks.replace(trl_distillation.GKD_PATH, function, tested=TESTED)


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
    operands = hidden, weight, bias
    rest = targets, temperature, chunk_size, final_logit_softcapping, logit_scale
    if hasattr(weight, "ds_id"):
        raise hooks.NotServedError
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(torch.promote_types(weight.dtype, hidden.dtype))  # cast_lm_head_to_fp32
    names = {given: name for given, name in OUTPUTS.items() if given in outputs}
    is_capped = final_logit_softcapping is not None
    has_own_mean = is_capped and names.pop("mean_logits", None) is not None
    found = linear_log_probs(
        hidden,
        weight,
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
            mean = own(*operands, *rest, ("mean_logits",))[3]
    if is_capped and entropy is not None:
        entropy = EntropyOfOwn.apply(  # type: ignore[no-untyped-call]
            lambda *leaves: own(*leaves, *rest, ("entropy",))[1], entropy.detach(), *operands
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
