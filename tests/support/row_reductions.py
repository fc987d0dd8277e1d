"""Row reductions of exact logits, as `cute_kernels.common.row_reductions` defines them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutefce.cute_kernels.variant import RowReductions


def reduced(u: Tensor, reference: Tensor, first: int, options: RowReductions) -> Tensor:
    """Return the planes (K, N) of logits u (N, V), -inf at the targets, as one partial."""
    return torch.stack(list(_planes(u, reference, first, options)))


def _planes(u: Tensor, reference: Tensor, first: int, options: RowReductions) -> Iterator[Tensor]:
    base = reference / math.log(2)
    is_empty = u.amax(1) == -torch.inf
    if options.entropy:
        mean = (u.softmax(1) * u.where(u > -torch.inf, 0)).sum(1) / math.log(2) - base
        yield mean.where(~is_empty, 0)
    if options.sum_squares:
        yield (2 * u).logsumexp(1) / math.log(2) - 2 * base
    if options.argmax:
        largest = u.amax(1)
        lowest = (u == largest[:, None]).int().argmax(1)  # the first of equal columns
        yield largest
        yield (first + lowest).where(~is_empty, 0).to(u.dtype)


def merged(planes: Tensor, sums: Tensor, options: RowReductions) -> Tensor:
    """Return the planes (K, N) of whole rows from those of partials (K, N, P), in float64."""
    parts, result = iter(planes.double()), []
    if options.entropy:
        shares = torch.softmax(sums.double() * math.log(2), 1)
        result.append((shares * next(parts)).sum(1))
    if options.sum_squares:
        result.append((next(parts) * math.log(2)).logsumexp(1) / math.log(2))
    if options.argmax:
        largest, entry = next(parts), next(parts)
        of_row = largest.amax(1, keepdim=True)
        result += [of_row[:, 0], entry.where(largest == of_row, torch.inf).amin(1)]
    return torch.stack(result)
