"""NeMo-RL: what its distillation takes of a student's logits, for a teacher's top k."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cutefce.integrations.deferral.log_probs import log_probs_of
from cutefce.integrations.support import hooks

PATH = "nemo_rl.algorithms.loss.utils:get_distillation_topk_logprobs_from_logits"


def topk_log_probs(
    student_logits: Any,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
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
        vocab_parallel_rank: not used.
        vocab_parallel_group: a group of tensor parallelism.
        context_parallel_group: a group of context parallelism.
    """
    if vocab_parallel_group is not None or context_parallel_group is not None:
        raise hooks.NotServedError
    indices = teacher_topk_indices.to(student_logits.device)[:, :-1]
    outputs = ("entropy",) if calculate_entropy and zero_outside_topk else ()
    found = log_probs_of(student_logits[:, :-1], indices, outputs)
    if found is None:
        raise hooks.NotServedError
    student = found.log_probs.to(torch.float32)
    teacher = teacher_topk_logits[:, :-1].to(student.device, student.dtype).log_softmax(-1)
    if not zero_outside_topk:
        student = student.log_softmax(-1)
    entropy = found.entropy
    return student, teacher, None if entropy is None else -entropy.to(torch.float32)
