"""Row reductions of exact logits, as `cute_kernels.common.row_reductions` defines them."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from cutefce.cute_kernels.variant import RowReductions


def reduced(
    u: Tensor, target: Tensor, reference: Tensor, first: int, options: RowReductions
) -> Tensor:
    """Return the planes (K, N) of logits u (N, V) with targets (N,), as one partial.

    `reference` (N,) are the targets' logits.  Column 0 is vocabulary entry `first`.
    """
    return torch.stack(list(_planes(u, target, reference, first, options)))


def others(u: Tensor, target: Tensor, first: int) -> Tensor:
    """Return logits u (N, V), -inf at the targets (N,)."""
    columns = torch.arange(first, first + u.shape[1], device=u.device)
    return u.masked_fill(target[:, None] == columns, -torch.inf)


def _planes(
    u: Tensor, target: Tensor, reference: Tensor, first: int, options: RowReductions
) -> Iterator[Tensor]:
    if options.of_all:
        largest, place = u.max(1, keepdim=True)
        x = (u - largest.where(largest > -torch.inf, 0)).scatter(1, place, -torch.inf)
        exps = x.exp()
        yield largest[:, 0]
        yield exps.sum(1)
        if options.entropy:
            yield (exps * x.where(exps > 0, 0)).sum(1) / math.log(2)
        if options.sum_squares:
            yield exps.square().sum(1)
    if options.of_others:
        u = others(u, target, first)
        largest = u.amax(1)
        lowest = (u == largest[:, None]).int().argmax(1)  # the first of equal columns
        yield largest
        yield (first + lowest).where(largest > -torch.inf, 0).to(u.dtype)
        yield (u > reference[:, None]).sum(1).to(u.dtype)


def merged(planes: Tensor, options: RowReductions) -> Tensor:
    """Return the planes (K, N) of whole rows from those of partials (K, N, P), in float64."""
    parts, result = iter(planes.double()), []
    if options.of_all:
        of_parts, rest = next(parts), next(parts)
        largest, owner = of_parts.max(1, keepdim=True)
        apart = of_parts - largest
        scale, joins = apart.exp(), torch.arange(planes.shape[2], device=owner.device) != owner
        result += [largest[:, 0], (scale * (rest + joins)).sum(1)]
        if options.entropy:
            moved = (rest + 1) * apart.where(scale > 0, 0) / math.log(2)
            result.append((scale * (next(parts) + moved)).sum(1))
        if options.sum_squares:
            result.append((scale.square() * (next(parts) + joins)).sum(1))
    if options.of_others:
        largest, entry, above = next(parts), next(parts), next(parts)
        of_row = largest.amax(1, keepdim=True)
        entry = entry.where(largest == of_row, torch.inf).amin(1)
        result += [of_row[:, 0], entry, above.sum(1)]
    return torch.stack(result)
