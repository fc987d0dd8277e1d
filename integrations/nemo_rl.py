"""NeMo-RL: log-probabilities of Megatron policies, and distillation of DTensor policies.

    import cutefce.integrations.nemo_rl

    cutefce.integrations.nemo_rl.enable()  # with use_fused_linear_logprobs
    cutefce.integrations.nemo_rl.enable_distillation(worker.model)  # of the student

Call them in the policy's workers, before the first step.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from cutefce.integrations.deferral.log_probs import log_probs_of
from cutefce.integrations.deferral.model import defer
from cutefce.integrations.options import loss_options, workspace_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "nemo-rl 0.6.0"
LOG_PROBS = "nemo_rl.distributed.model_utils:from_parallel_hidden_states_to_logprobs"
TOP_K = "nemo_rl.algorithms.loss.utils:get_distillation_topk_logprobs_from_logits"


def enable() -> None:
    """Replace the function of hidden states and weight that NeMo-RL's forward of GPTModel calls.

    Raises:
        ImportError: if NeMo-RL is not installed.
        RuntimeError: if NeMo-RL's function has other parameters.
    """
    unused = "runtime_gather_output", "inference_only", "chunk_size"
    hooks.replace(LOG_PROBS, log_probs, tested=TESTED, unused=unused)


def enable_distillation(model: nn.Module) -> None:
    """Defer the logits of a student, and replace what NeMo-RL's distillation takes of them.

    NeMo-RL's own function still runs for ranks that share a vocabulary or a sequence, more than 256
    classes, and logits that something has made before.

    Args:
        model: the student of this worker, as for `cutefce.defer`.

    Raises:
        ImportError: if NeMo-RL is not installed.
        TypeError: if the head is not a plain `nn.Linear`.
        RuntimeError: if it is deferred already, or NeMo-RL's function has other parameters.
    """
    hooks.replace(TOP_K, topk_log_probs, tested=TESTED, unused=["vocab_parallel_rank"])
    defer(model, **workspace_options())


def log_probs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: dist.ProcessGroup,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the log-probability (b, s - 1) of every token but the first of target (b, s).

    Args:
        tensor_parallel_hidden_states: (s / ranks, b, D), this rank's part of the sequence.
        output_weight_layer: (V / ranks, D), this rank's classes.
        target: (b, s) token ids of all ranks' classes.
        vocab_start_index: this rank's first class.
        vocab_end_index: the class after this rank's last one, without those of padding.
        tp_group: the group of tensor and sequence parallelism.
        cp_group: a group of one rank, or None.

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


def topk_log_probs(
    student_logits: Any,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-probabilities (B, T - 1, K) of student and teacher, and Σ p log p (B, T - 1).

    The last is None unless `calculate_entropy`.  The parameters are NeMo-RL's, whose own function
    serves logits that are not deferred, and ranks that share a vocabulary or a sequence.

    Args:
        student_logits: (B, T, V), which may be deferred.
        teacher_topk_logits: (B, T, K).
        teacher_topk_indices: (B, T, K) the teacher's classes.
        zero_outside_topk: whether the student's are of all classes; else they are normalized over
            the K classes, as the teacher's are.
        calculate_entropy: whether the last result is wanted.
        vocab_parallel_group: a group of tensor parallelism.
        context_parallel_group: a group of context parallelism.
    """
    if vocab_parallel_group is not None or context_parallel_group is not None:
        raise hooks.NotServedError
    indices = teacher_topk_indices.to(student_logits.device)[:, :-1]
    outputs = ("entropy",) if calculate_entropy and zero_outside_topk else ()
    found = log_probs_of(student_logits[:, :-1], target_indices=indices, outputs=outputs)
    if found is None:
        raise hooks.NotServedError
    student = found.log_probs.to(torch.float32)
    teacher = teacher_topk_logits[:, :-1].to(student.device, student.dtype).log_softmax(-1)
    if not zero_outside_topk:
        student = student.log_softmax(-1)
    entropy = found.entropy
    return student, teacher, None if entropy is None else -entropy.to(torch.float32)
