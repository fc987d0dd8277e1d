"""NeMo-RL: log-probabilities of Megatron policies, and distillation of DTensor policies.

    import cutefce.integrations.nemo_rl

    cutefce.integrations.nemo_rl.enable()  # with use_fused_linear_logprobs
    cutefce.integrations.nemo_rl.enable_distillation(worker.model)  # of the student

Call them in the policy's workers, before the first step.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cutefce.integrations.deferral.model import defer
from cutefce.integrations.distillation import nemo_rl as distillation
from cutefce.integrations.gradients import loss_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "nemo-rl 0.6.0"
PATH = "nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs"


def enable() -> None:
    """Replace the function of hidden states and weight that NeMo-RL's forward of GPTModel calls.

    Raises:
        ImportError: if NeMo-RL is not installed.
        RuntimeError: if it is enabled already, or NeMo-RL's function has other parameters.
    """
    hooks.replace(PATH, log_probs, tested=TESTED)


def enable_distillation(model: nn.Module) -> None:
    """Defer the logits of a student, and replace what NeMo-RL's distillation takes of them.

    NeMo-RL's own function still runs for ranks that share a vocabulary or a sequence, more than 256
    classes, and logits that something has made before, as a sampling temperature other than 1 does.

    Args:
        model: the student of this worker, as for `cutefce.defer`.

    Raises:
        ImportError: if NeMo-RL is not installed.
        TypeError: if the head is not a plain `nn.Linear`.
        RuntimeError: if it is deferred already, or NeMo-RL's function has other parameters.
    """
    if not hooks.is_replaced(distillation.PATH, TESTED):
        hooks.replace(distillation.PATH, distillation.topk_log_probs, tested=TESTED)
    defer(model)


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
        **loss_options(),
    )
    return found.log_probs.T[:, :-1]
