"""Outputs of the kernels of soft targets for a tuning case: logits, and entries that are put.

Probabilities and factors are powers of 2, so that entries are exact in 16 bits.
"""

import torch

from cutefce.autotune_cache.tuning.cases import Case, CheckedOutput
from cutefce.cute_kernels.integers import round_up
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.targets import make_targets
from cutefce.ops.soft_targets.leads import leads

CLASSES, STRIDE, LEAD = 5, 7, 3
"""Classes of a token, and their distance; of few classes, some are equal; and the likeliest one."""
LOGIT_ROUNDINGS = 16
"""Float32 roundings of logits of up to 2**8, beside which a small excess may remain."""


def soft_outputs(case: Case, primitives: Primitives) -> dict[str, CheckedOutput]:
    """Return the logits and excess of classes but the leads, and exponentials with entries.

    These are put among zeros, and among factors of tokens.
    """
    projection, vocab = primitives, case.problem.vocab
    h, w = projection.prepare(case.h, case.w)
    steps = torch.arange(CLASSES, device=h.device)
    index = (case.y.clamp(min=0)[:, None] + STRIDE * steps) % vocab
    probs = (0.5 ** (1.0 + (steps - LEAD) % CLASSES)).expand(index.shape)
    options, tensors = LossOptions(), TensorOptions(target_indices=index, target_probs=probs)
    lead, dtype = leads(index, probs, vocab, options.ignore_index), sum_dtype(h.dtype)
    targets = make_targets(lead, vocab, options, tensors, dtype)
    target_logit = projection.target_logit(h, w, targets)
    soft, exps = targets.soft, h.new_zeros(len(h), vocab)
    assert soft is not None
    soft.excess = projection.soft_excess(h, w, targets, target_logit)
    assert soft.logits is not None
    logits = soft.logits.where(soft.coefficient != 0, 0)
    projection.put_soft(soft.coefficient, exps, 0, targets)
    scaled = h.new_empty(len(h), round_up(vocab, 8))[:, :vocab]  # of whole vectors
    scaled.copy_(exps == 0)  # wide exponentials have entries added
    factor = 0.5 ** (torch.arange(len(h), device=h.device) % CLASSES)
    factor = factor.to(dtype)
    projection.scale_soft(soft.coefficient, factor, scaled, 0, targets, factor)
    results = {
        "soft logits": logits,
        "excess": soft.excess,
        "entries of soft targets": exps,
        "entries of soft targets among scaled exponentials": scaled,
    }
    return {
        name: CheckedOutput(x, 1 if x.dtype == h.dtype else LOGIT_ROUNDINGS, floor=1.0)
        for name, x in results.items()
    }
