"""NeMo Automodel: a loss for `_target_`.

In the recipe:

    loss_fn:
      _target_: cutefce.integrations.automodel.CutefceLoss
"""

from inspect import signature
from typing import Any

import torch
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from cutefce.integrations.options import checked_options
from cutefce.integrations.report import note_call
from cutefce.integrations.support import hooks
from cutefce.ops.interface.api import linear_cross_entropy
from cutefce.ops.interface.arguments import check_arguments

TESTED = "nemo-automodel 0.7.0"
PATH = "nemo_automodel.components.loss.chunked_ce:ChunkedCrossEntropy.forward"

_UNSEEN = (
    "dim_model_base",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
)
"""Keys of models that change hidden states or logits beside the head, unseen by this loss."""


class CutefceLoss(ChunkedCrossEntropy):
    """Automodel's `ChunkedCrossEntropy`, fused, also for models that cap their logits.

    A subclass, because recipes show the head and the model's configuration to that class alone.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "sum",
        gradient: str = "exact",
        samples: int = 256,
        workspace: int | str | None = None,
        **removed: Any,
    ) -> None:
        hooks.check(PATH, [*signature(CutefceLoss.forward).parameters], TESTED)
        check_arguments({"reduction": reduction})
        super().__init__(compile=False, ignore_index=ignore_index, reduction=reduction)
        self.softcap: float | None = None
        self.loss_options = checked_options(gradient, samples, workspace, **removed)

    def validate_lm_head(self, lm_head: nn.Module | None, *, model_config: Any = None) -> nn.Module:
        """Return the head, a linear layer without bias; keep the softcap of the model.

        Raises:
            NotImplementedError: for another head, or if the configuration names a change of the
                logits that is not served.
        """
        config = {} if model_config is None else model_config.get_text_config().to_dict()
        for key in _UNSEEN:
            if config.get(key) not in (None, 1):
                raise NotImplementedError(
                    f"{key}: got {config[key]} in the model's configuration, expected None or 1; "
                    "use MaskedCrossEntropy"
                )
        plain = isinstance(lm_head, nn.Linear) and type(lm_head).forward is nn.Linear.forward
        if lm_head is None or not plain or lm_head.bias is not None:
            raise NotImplementedError(
                f"lm_head: got {lm_head}, expected an nn.Linear without bias; use "
                "MaskedCrossEntropy"
            )
        self.softcap = config.get("final_logit_softcapping")
        return lm_head

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        lm_weight: Tensor,
        num_label_tokens: int | None = None,
        grad_reduce_group: ProcessGroup | None = None,
        loss_weights: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the loss: (), or of labels' shape with reduction "none"; float32.

        Args:
            hidden_states: (..., D); or (1, T, D) beside labels (T,).
            labels: (...) class indices, or `ignore_index`.
            lm_weight: (V, D), plain, or a DTensor that FSDP2 has sharded.
            num_label_tokens: divisor of the sum.
            grad_reduce_group: the ranks over which `lm_weight` is sharded.
            loss_weights: (...) factor of each token's loss.
            mask: (...) tokens with 0 are ignored.
            logits_dtype: not used: the logits are not rounded.

        The parameters are those of `ChunkedCrossEntropy.forward`.

        Raises:
            ValueError: for `num_label_tokens` or `loss_weights` beside a reduction other than
                "sum".
        """
        if self.reduction != "sum" and not (num_label_tokens is None and loss_weights is None):
            raise ValueError(
                f"reduction: got {self.reduction!r}, expected 'sum' beside num_label_tokens or "
                "loss_weights"
            )
        if hidden_states.ndim == 3 and hidden_states.shape[0] == 1 and labels.ndim == 1:
            hidden_states = hidden_states.squeeze(0)
        labels = labels.to(hidden_states.device)
        if mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, self.ignore_index)
        weight = self.materialize_lm_weight(lm_weight, grad_reduce_group=grad_reduce_group)
        if loss_weights is not None:
            loss_weights = loss_weights.to(hidden_states.device, torch.float32)
        hidden_states = hidden_states.to(weight.dtype)
        loss: Tensor = linear_cross_entropy(
            hidden_states,
            weight,
            labels,
            reduction=self.reduction if num_label_tokens is None else "mean",
            denominator=num_label_tokens,
            ignore_index=self.ignore_index,
            token_weights=loss_weights,
            softcap=self.softcap,
            **self.loss_options,
        )
        note_call(PATH, is_fused=True)
        return loss
