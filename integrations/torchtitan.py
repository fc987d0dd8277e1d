"""Torchtitan: an override of the loss, in a configuration whose loss is a `ChunkedLossWrapper`.

On the command line:

    --override.imports cutefce.integrations.torchtitan.fused_loss
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config.override import derive, override
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from cutefce.integrations.options import loss_options
from cutefce.integrations.report import note_call
from cutefce.integrations.support import hooks
from cutefce.ops.interface.api import linear_cross_entropy

TESTED = "torchtitan 0.3.0"
PATH = "torchtitan.components.loss:ChunkedLossWrapper.__call__"


class FusedLoss(ChunkedLossWrapper):
    """The loss of a `ChunkedLossWrapper` around `CrossEntropyLoss`, as one fused call.

    A subclass, because the trainer gives hidden states and the head to that class alone.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        """That of `ChunkedLossWrapper`, of which `num_chunks` is not used."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        if type(self.loss_fn) is not CrossEntropyLoss:
            raise NotImplementedError(
                f"loss.loss_fn: got {type(self.loss_fn).__name__}, expected CrossEntropyLoss"
            )

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the sum of the losses, over `global_valid_tokens` if given, and no metrics.

        Args:
            pred: (B, L, D) hidden states.
            labels: (B, L) class indices, or -100.
            global_valid_tokens: () divisor.
            loss_inputs: not used, as by `CrossEntropyLoss`.

        Raises:
            NotImplementedError: for the backend "full_dtensor", or a head that is not served.
        """
        if get_spmd_backend() == "full_dtensor":
            raise NotImplementedError(
                "parallelism.spmd_backend: got 'full_dtensor', expected 'spmd_types' or "
                "'partial_dtensor'"
            )
        head: Any = self.lm_head  # the trainer sets it
        options = logit_options(head)

        def loss_of(hidden: Tensor) -> Tensor:
            weight, bias, group = head.weight, head.bias, None
            if get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1:
                group = current_spmd_mesh().get_group("tp")
                # torchtitan adds the ranks' gradients, and cutefce's is whole on each
                hidden = spmd.convert(hidden, group, src=spmd.R, dst=spmd.I, expert_mode=True)
            elif isinstance(weight, DTensor) and not isinstance(hidden, DTensor):
                group = weight.device_mesh.get_group("tp")
            loss: Tensor = linear_cross_entropy(
                hidden,
                weight,
                labels,
                linear_bias=bias,
                reduction="sum",
                group=group,
                **options,
                **loss_options(),
            )
            return loss

        own = vars(head).get("forward")  # that of a parallelized module
        head.forward = loss_of  # inside its hooks
        try:
            with spmd.no_typecheck():
                loss = head(pred)  # FSDP2 has the whole weight there, and only there
                if global_valid_tokens is not None:
                    loss = loss / global_valid_tokens
        finally:
            del head.forward
            if own is not None:
                head.forward = own
        if spmd.is_type_checking():
            spmd.assert_type(loss, {"dp": spmd.P, "cp": spmd.P, "tp": spmd.I})
        note_call(PATH, is_fused=True)
        return loss, {}


def logit_options(head: Any) -> dict[str, Any]:
    """Return what the head does to its logits, as arguments of `linear_cross_entropy`.

    Raises:
        NotImplementedError: for a head that is neither a linear layer nor a `SoftCappedLinear`.
    """
    forward = type(head).forward
    if forward is nn.Linear.forward:
        return {}
    if forward.__qualname__ == "SoftCappedLinear.forward":
        return {"logit_scale": head.output_multiplier, "softcap": head.output_soft_cap_temp}
    raise NotImplementedError(
        f"lm_head: got {type(head).__name__}, expected a Linear or a SoftCappedLinear"
    )


@override(target=ChunkedLossWrapper.Config)
def fused_loss(config: ChunkedLossWrapper.Config) -> FusedLoss.Config:
    """Return the configuration of a `FusedLoss` instead of that of a `ChunkedLossWrapper`.

    Raises:
        NotImplementedError: for the configuration of a subclass.
    """
    if type(config) is not ChunkedLossWrapper.Config:
        raise NotImplementedError(
            f"loss: got {type(config).__qualname__}, expected ChunkedLossWrapper.Config"
        )
    hooks.check(PATH, [*signature(FusedLoss.__call__).parameters], TESTED)
    derived: FusedLoss.Config = derive(config, FusedLoss.Config)
    return derived
