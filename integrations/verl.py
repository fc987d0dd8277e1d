"""verl: log-probabilities and entropies of its fused path, on FSDP and Megatron.

Importing this module enables it.  In every worker, set

    VERL_USE_EXTERNAL_MODULES=cutefce.integrations.verl

and, in verl's configuration of the model, `use_fused_kernels=True` and
`fused_kernel_options.impl_backend=triton`.  Models of transformers keep the scale, the bound and
the bias of their heads, which verl's own function leaves out.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cutefce.integrations.options import loss_options
from cutefce.integrations.support import hooks
from cutefce.integrations.support.gathered import of_gathered
from cutefce.integrations.support.logit_options import logit_options
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "verl 0.9.1"
FUNCTION = "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"

_head: ContextVar[dict[str, Any]] = ContextVar("_head")
"""Options of the head whose model is running."""


def enable() -> None:
    """Replace verl's function, and what gives a model the forward that calls it.

    Raises:
        ImportError: if verl is not installed.
        RuntimeError: if a function of verl has other parameters.
    """
    path = "verl.models.transformers.monkey_patch:patch_forward_with_backends"
    hooks.replace(path, patch_forward_with_backends, tested=TESTED, is_counted=False)
    hooks.replace(FUNCTION, linear_cross_entropy, tested=TESTED, importers="verl")


def patch_forward_with_backends(
    model: Any,
    use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None,
    *,
    own: Callable[[], None],
) -> None:
    """Do what verl's function does, and let the forward that it sets keep the head's options."""
    before = type(model).forward
    own()
    if not use_fused_kernels or fused_kernels_backend != "triton":
        return
    fused = type(model).forward
    before = getattr(before, "before", before)  # of a class with several models
    model.cutefce_logit_options = logit_options(model, before)

    @functools.wraps(fused)
    def forward(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not hasattr(self, "cutefce_logit_options"):  # of a model that verl did not patch
            self.cutefce_logit_options = logit_options(self, before)
        options = dict(self.cutefce_logit_options)
        bias = self.lm_head.bias
        if bias is not None:
            options["linear_bias"] = bias * options["logit_scale"]
        token = _head.set(options)
        try:
            return fused(self, *arguments, **keywords)
        finally:
            _head.reset(token)

    forward.before = before  # type: ignore[attr-defined]
    type(model).forward = forward


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, of the shape of labels.

    Args:
        hidden: (..., D) hidden states; with a group, those that Megatron gathered.
        weight: (V, D), or with a group, this rank's classes.
        labels: (...) with as many class indices as there are hidden states.
        temperature: divisor of the logits.
        reduction: "none".
        dist_process_group: the group of tensor parallelism.

    Raises:
        ValueError: for another reduction.
        NotImplementedError: for hidden states that need a gradient and are not gathered.
    """
    if reduction != "none":
        raise ValueError(f"reduction: got {reduction!r}, expected 'none'")
    found = linear_log_probs(
        of_gathered(hidden, dist_process_group).reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        outputs=("entropy",),
        temperature=temperature,
        group=dist_process_group,
        **_head.get({}),
        **loss_options(),
    )
    assert found.entropy is not None
    return found.log_probs.view(labels.shape), found.entropy.view(labels.shape)


enable()
