"""Outputs of the kernels of soft targets for a tuning case: logits, and entries that are put.

Probabilities are powers of 2, so that entries are exact in 16 bits.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.primitives.interface import target_logits
from cutefce.ops.rows.soft_rows import leads
from cutefce.ops.rows.targets import make_targets, sum_dtype
from cutefce.ops.strategies.loss_inputs import LossInputs

CLASSES, STRIDE = 5, 7
"""Classes of a token, and their distance; of few classes, some are equal."""
LOGIT_ROUNDINGS = 16
"""Float32 roundings of logits of up to 2**8, beside which a small excess may remain."""


def soft_outputs(inputs: LossInputs[Any, Any], y: Tensor) -> dict[str, Tensor]:
    """Return the classes' logits, their excess, and zeros among which entries are put."""
    projection, h, w, vocab = inputs.primitives.projection, inputs.h, inputs.w, len(inputs.w)
    steps = torch.arange(CLASSES, device=y.device)
    index = (y.clamp(min=0)[:, None] + STRIDE * steps) % vocab
    probs = (0.5 ** (1.0 + steps)).expand(index.shape)
    options, tensors = LossOptions(), TensorOptions(target_indices=index, target_probs=probs)
    lead = leads(index, probs, vocab, options.ignore_index)
    targets = make_targets(lead, vocab, options, tensors, sum_dtype(h.dtype))
    target_logits(projection, h, w, targets)
    soft, exps = targets.soft, h.new_zeros(len(h), vocab)
    assert soft is not None and soft.logits is not None and soft.excess is not None
    projection.put_soft(soft.coefficient, exps, 0, targets)
    logits = soft.logits.where(soft.coefficient != 0, 0)
    return {"soft logits": logits, "excess": soft.excess, "entries of soft targets": exps}
