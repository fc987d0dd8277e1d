"""SkyRL: log-probabilities and entropies of its fused path, on Megatron.

    import cutefce.integrations.skyrl

    cutefce.integrations.skyrl.enable()  # with fused_lm_head_logprob=true

Call it in the workers, before the first step.
"""

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cutefce.integrations.options import loss_options
from cutefce.integrations.support import hooks
from cutefce.integrations.support.gathered import of_gathered
from cutefce.ops.interface.log_probs import LogProbs, linear_log_probs

TESTED = "skyrl 0.3.0"
MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
LOG_PROBS = f"{MODULE}:_fused_lm_head_logprob_apply"
ENTROPY = f"{MODULE}:_fused_vocab_parallel_entropy_from_hidden"


def enable() -> None:
    """Replace what SkyRL computes of hidden states and weight, packed or not.

    SkyRL's own code still rolls the targets, and gathers the values of context parallelism.

    Raises:
        ImportError: if SkyRL or Megatron-Core is not installed.
        RuntimeError: if a function of SkyRL has other parameters, or before Python 3.12.
    """
    version = sys.version_info[:2]
    if version < (3, 12) and MODULE not in sys.modules:
        raise RuntimeError(
            f"Python: got {version[0]}.{version[1]}, expected 3.12 or later, for SkyRL"
        )
    # the indices tell what the group does, and memory is planned
    unused = "backend", "vocab_start_index", "vocab_end_index", "chunk_size", "inference_only"
    hooks.replace(LOG_PROBS, log_probs, tested=TESTED, unused=unused)
    hooks.replace(ENTROPY, entropies, tested=TESTED, importers="skyrl", unused=["chunk_size"])


def log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, tp_group: dist.ProcessGroup
) -> Tensor:
    """Return the log-probabilities (B, S) of target, in float32.

    Args:
        hidden: (B, S, D), gathered from the ranks of sequence parallelism.
        weight: (V / ranks, D), this rank's classes.
        target: (B, S) token ids of all ranks' classes.
        tp_group: the group of tensor parallelism.

    Raises:
        NotImplementedError: for hidden states of several ranks that need a gradient and are not
            gathered.
    """
    return _values(hidden, weight, target, tp_group).log_probs


def entropies(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> Tensor:
    """Return the entropies (B, S), in nats and float32; unlike SkyRL's, with gradients.

    Args:
        hidden: as of `log_probs`.
        lm_head_weight: the same.
        tp_group: the same.
        temperature: divisor of the logits.
    """
    options = {"outputs": ("entropy",), "temperature": temperature}
    entropy = _values(hidden, lm_head_weight, None, tp_group, **options).entropy
    assert entropy is not None
    return entropy


def _values(
    hidden: Tensor, weight: Tensor, target: Tensor | None, group: dist.ProcessGroup, **options: Any
) -> LogProbs:
    rows = of_gathered(hidden, group).to(weight.dtype)
    return linear_log_probs(rows, weight, target, group=group, **options, **loss_options())
