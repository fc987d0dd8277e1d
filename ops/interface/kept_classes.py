"""Log-probabilities under a softmax over the classes that a sampler kept.

They are made of those under the softmax of all classes: with P = Σ_{c kept} p_c, log p_y - log P.
The target is one of the kept classes.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import checks
from cutefce.ops.interface.arguments import LossOptions
from cutefce.ops.interface.soft_targets import MAX_CLASSES
from cutefce.ops.operators.operators import define
from cutefce.ops.parallel.dtensor import replicated

NONE = -1
"""What fills up the classes of a token that has fewer than others."""
IGNORED = LossOptions().ignore_index


def kept_indices(target: Tensor | None, given: dict[str, Any], vocab: int) -> Tensor:
    """Return the target and each other kept class of the tokens once, (..., K + 1).

    Places of no class are `IGNORED`.  `kept_classes` and `ignore_index` are taken out of the
    arguments by name.  `vocab` is the number of classes of all ranks.

    Raises:
        TypeError, ValueError, NotImplementedError, IndexError: naming the argument.
    """
    kept: Tensor = given.pop("kept_classes")
    ignored = given.pop("ignore_index", None)
    for name in ("target_indices", "logit_floor"):
        if name in given:
            raise NotImplementedError(f"kept_classes: got some with {name}, expected one of them")
    if target is None:
        raise ValueError("kept_classes: got some without a target, expected None")
    for name, x in (("target", target), ("kept_classes", kept)):
        if not checks.has_integers(x):
            raise TypeError(f"{name}: got dtype {x.dtype}, expected integers")
    y, kept = replicated("target", target).long(), replicated("kept_classes", kept)
    checks.check_device("kept_classes", kept, y, "target")
    kept = kept.long()
    fits = kept.ndim == y.ndim + 1 and kept.shape[:-1] == y.shape
    if not fits or not 1 <= kept.shape[-1] < MAX_CLASSES:
        raise ValueError(
            f"kept_classes: got shape {tuple(kept.shape)}, expected "
            f"({''.join(f'{size}, ' for size in y.shape)}K), K from 1 to {MAX_CLASSES - 1}"
        )
    ignore_index = IGNORED if ignored is None else ignored
    listed: Tensor = torch.ops.cutefce.listed_classes(y, kept, ignore_index, vocab)
    return listed


def listed_classes(target: Tensor, kept: Tensor, ignore_index: int, vocab: int) -> Tensor:
    """Return the classes (..., K + 1) of `kept_indices`, as an operator, which reads values.

    `target` is (...) int64, `kept` (..., K) int64.

    Raises:
        IndexError: on a CPU, for a class outside [0, vocab), at a token that is not ignored.
    """
    is_ignored = target == ignore_index
    y = target.masked_fill(is_ignored, NONE)
    if y.is_cpu:
        _check_classes("target", y, ~is_ignored, vocab, "0 <= target", 1)
        counts, expected = (kept != NONE) & ~is_ignored[..., None], "-1 or 0 <= class"
        _check_classes("kept_classes", kept, counts, vocab, expected, kept.shape[-1])
    kept = kept.sort(dim=-1).values
    again = torch.zeros_like(kept, dtype=torch.bool)
    again[..., 1:] = kept[..., 1:] == kept[..., :-1]
    left_out = again | (kept == NONE) | (kept == y[..., None]) | is_ignored[..., None]
    y = y.masked_fill(is_ignored, IGNORED)
    return torch.cat([y[..., None], kept.masked_fill(left_out, IGNORED)], -1)


def _fake(target: Tensor, kept: Tensor, ignore_index: int, vocab: int) -> Tensor:
    return target.new_empty((*target.shape, kept.shape[-1] + 1))


def _check_classes(
    name: str, x: Tensor, counts: Tensor, vocab: int, expected: str, per_token: int
) -> None:
    """Raise IndexError for the first class of x, where it counts, that is outside [0, vocab)."""
    wrong = (counts & ((x < 0) | (x >= vocab))).reshape(-1).nonzero()
    if len(wrong):
        got, token = int(x.reshape(-1)[wrong[0]]), int(wrong[0]) // per_token
        raise IndexError(f"{name}: got {got} at token {token}, expected {expected} < {vocab}")


_OPERANDS = "Tensor target, Tensor kept, int ignore_index, SymInt vocab"
define(listed_classes, f"({_OPERANDS}) -> Tensor", _fake)


def kept_values(log_p: Tensor, lse: Tensor, indices: Tensor) -> dict[str, Tensor]:
    """Return log-probabilities and outputs (...) of the target under a softmax of kept classes.

    `log_p` (..., K + 1) and lse (...) are those of all classes; `indices` are `kept_indices`.
    """
    counts = indices != IGNORED
    active = counts[..., 0]
    # a token without classes has the values 0: its own place stands for one
    counts = torch.cat([torch.ones_like(counts[..., :1]), counts[..., 1:]], -1)
    log_p = log_p.masked_fill(~counts, -torch.inf)
    total = log_p.logsumexp(-1)
    log_p = log_p - total[..., None]
    p, own, others = log_p.exp(), log_p[..., 0], log_p[..., 1:]
    largest = others.amax(-1)
    is_top1, beyond = own >= largest, torch.iinfo(torch.long).max
    is_left_out = (others < largest[..., None]) | ~counts[..., 1:]
    lowest = indices[..., 1:].masked_fill(is_left_out, beyond).amin(-1)
    found = {
        "log_probs": own,
        "lse": lse + total,
        "entropy": -(p * log_p.masked_fill(p == 0, 0)).sum(-1),
        "sum_p_squared": p.square().sum(-1).detach(),
        "is_top1": is_top1,
        "argmax": torch.where(is_top1 | (lowest == beyond), indices[..., 0], lowest),
        "rank": (others > own[..., None]).sum(-1),
    }
    return {name: torch.where(active, x, torch.zeros_like(x)) for name, x in found.items()}
