"""NeMo-RL: log-probabilities of its Megatron policies with `use_fused_linear_logprobs`.

Call `cutefce.integrations.nemo_rl.enable()` in the policy's workers, before the first step.
"""

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from cutefce.integrations.gradients import row_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "nemo-rl 0.6.0"
PATH = "nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs"
PARAMETERS = (
    "tensor_parallel_hidden_states",
    "output_weight_layer",
    "runtime_gather_output",
    "target",
    "vocab_start_index",
    "vocab_end_index",
    "tp_group",
    "inference_only",
    "cp_group",
    "chunk_size",
)


def enable() -> None:
    """Replace the function of hidden states and weight that NeMo-RL's forward of GPTModel calls.

    Raises:
        ImportError: if NeMo-RL is not installed.
        RuntimeError: if it is enabled already, or NeMo-RL's function has other parameters.
    """
    hooks.replace(PATH, log_probs, parameters=PARAMETERS, tested=TESTED)


def log_probs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    inference_only: bool = False,
    cp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the log-probability (b, s - 1) of every token but the first of target (b, s).

    More than eight parameters: they are NeMo-RL's, of which `runtime_gather_output`,
    `inference_only` and `chunk_size` change no value.

    Args:
        tensor_parallel_hidden_states: (s / ranks, b, D), this rank's part of the sequence.
        output_weight_layer: (V / ranks, D), this rank's classes.
        runtime_gather_output: not used.
        target: (b, s) token ids of all ranks' classes.
        vocab_start_index: this rank's first class.
        vocab_end_index: the class after this rank's last one, without those of padding.
        tp_group: the group of tensor and sequence parallelism.
        inference_only: not used.
        cp_group: a group of one rank, or None.
        chunk_size: not used.

    Raises:
        NotImplementedError: for context parallelism.
        ValueError: for classes that are not those of this rank's equal part.
    """
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise NotImplementedError(
            f"cp_group: got {dist.get_world_size(cp_group)} ranks, which cutefce does not serve "
            "here; expected 1"
        )
    first = dist.get_rank(tp_group) * len(output_weight_layer)
    if vocab_start_index != first or vocab_end_index > first + len(output_weight_layer):
        raise ValueError(
            f"vocab_start_index, vocab_end_index: got {vocab_start_index} and {vocab_end_index}, "
            f"expected {first} and at most {first + len(output_weight_layer)}, the rows of "
            "output_weight_layer"
        )
    found = linear_log_probs(
        tensor_parallel_hidden_states,
        output_weight_layer,
        F.pad(target[:, 1:], (0, 1), value=-100).T,
        group=tp_group,
        sequence_parallel=True,
        **row_options(),
    )
    return found.log_probs.T[:, :-1]
