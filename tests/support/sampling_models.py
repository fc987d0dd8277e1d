"""Torch models of the kernels of sampled gradients, see `kernel_models`."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.spec import sampling as spec
from cutefce.cute_kernels.spec.sampling import COLUMN_FACTOR
from cutefce.ops.sampling.random_bits import _mix_, _signed, row_states

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor, int]
MASK = 0xFFFFFFFF


def packed(index: Tensor, value: Tensor) -> Tensor:
    """Return entries (.., K) int64."""
    return index.long() << 32 | value.float().contiguous().view(torch.int32).long() & MASK


def unpacked(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of entries."""
    return entries >> 32, (entries & MASK).to(torch.int32).view(torch.float32)


def prepare_samples(kernel: spec.PrepareSamplesSpec, *arguments: Any) -> None:
    steps: dict[str, Callable[..., None]] = {
        "estimate": estimate_lse,
        "first": _prepare_first,
        "again": _prepare_again,
    }
    steps[kernel.step](*arguments)


def estimate_lse(
    partials: Tensor,
    drawn: Tensor,
    reference: Tensor,
    estimate: Tensor,
    log2_ratio: float,
    only_drawn: int,
) -> None:
    sums = [torch.zeros(len(reference), 1), drawn + log2_ratio]
    sums += [] if only_drawn else [partials]
    lse = reference + (torch.cat(sums, 1) * math.log(2)).logsumexp(1)
    estimate[:] = torch.where(reference == torch.inf, torch.inf, lse)


def _prepare_first(
    estimate: Tensor,
    order: Tensor,
    seed: Tensor,
    threshold: Tensor,
    row_hash: Tensor,
    counts: Tensor,
    log2_samples: float,
    selects: int,
) -> None:
    threshold[:] = estimate / math.log(2) - log2_samples - 32
    tokens = order if selects else torch.arange(len(estimate))
    row_hash[:] = row_states(seed, tokens)
    counts.zero_()


def final_threshold(
    threshold: Tensor, reference: Tensor, sum_exp: Tensor, log2_samples: float
) -> Tensor:
    exact = (reference + sum_exp.log()) / math.log(2) - log2_samples - 32
    return torch.where(exact > threshold, exact, threshold)


def _prepare_again(
    order: Tensor,
    count: Tensor,
    reference: Tensor,
    sum_exp: Tensor,
    threshold: Tensor,
    counts: Tensor,
    own_reference: Tensor,
    log2_samples: float,
) -> None:
    rows = order[: int(count[0])]
    final = final_threshold(threshold, reference, sum_exp, log2_samples)
    threshold[rows], counts[rows] = final[rows], 0
    own_reference.fill_(torch.inf)
    own_reference[: len(rows)] = reference[rows]


def _is_kept(u: Tensor, columns: Tensor, threshold: Tensor, row_hash: Tensor, scale: Any) -> Tensor:
    """Return whether logits u (R, C) of global `columns`, (C,) or (R, C), are kept."""
    bits = _mix_(row_hash[:, None] ^ columns.to(torch.int32) * _signed(COLUMN_FACTOR))
    limit = torch.exp2(u / math.log(2) - threshold[:, None])
    if scale is not None:
        limit = limit * (1 - (u / scale[:, None]) ** 2).clamp(min=0)
    return (bits.to(torch.int64) & MASK).float() < limit


def sample(u: Tensor, columns: Tensor, scale: Tensor | None, samples: tuple[Any, ...]) -> None:
    """Append what is kept of u (R, C), in an order of its own."""
    threshold, row_hash, counts, entries, shard_start, order, maps = samples
    rows, capacity = len(u), entries.shape[1]
    places = order[:rows] if maps else torch.arange(rows)
    own_scale = None if scale is None else scale[:rows]
    ids = columns + shard_start
    kept = _is_kept(u, ids, threshold[places], row_hash[places], own_scale)
    for row, place in enumerate(places.tolist()):
        found = kept[row].nonzero()[:, 0].flip(0)
        counts[place] += len(found)
        own = found[:capacity]
        entries[place, : len(own)] = packed(columns[own], u[row, own])


def sort_samples(
    kernel: spec.SortSamplesSpec,
    entries: Tensor,
    counts: Tensor,
    threshold: Tensor,
    row_hash: Tensor,
    reference: Tensor,
    sum_exp: Tensor,
    row_scale: Tensor | None,
    log2_samples: float,
    shard_start: int,
) -> None:
    assert (row_scale is not None) == kernel.softcap and entries.shape[1] <= kernel.size
    counts[counts > entries.shape[1]] = -1
    final = final_threshold(threshold, reference, sum_exp, log2_samples)
    for row, count in enumerate(counts.tolist()):
        if count <= 0:
            continue
        own = slice(row, row + 1)
        columns, u = unpacked(entries[row, :count].sort().values)
        scale = None if row_scale is None else row_scale[own]
        kept = _is_kept(u[None], columns + shard_start, final[own], row_hash[own], scale)[0]
        columns, u = columns[kept], u[kept]
        value = (u - reference[row]).exp()
        if row_scale is not None:
            value = value * (1 - (u / row_scale[row]) ** 2).clamp(min=0)
        least = ((final[row] + 32) * math.log(2) - reference[row]).exp()
        entries[row, : len(u)] = packed(columns, torch.maximum(value, least))
        counts[row] = len(u)


def list_samples(_: spec.ListSamplesSpec, rows: Rows, lists: tuple[Tensor, ...]) -> None:
    entries, counts, target, scale, target_scale, order, maps, reference, ignored = rows
    out, ends, slots, class_counts, start = lists
    undefined = ~(scale.isfinite() & reference.isfinite()) & (target != ignored)
    start[:] = torch.where(undefined.any(), torch.nan, 0)
    vocab = len(class_counts)
    assert len(out) >= len(counts) * (entries.shape[1] + 1) and len(out) == len(slots)
    inside = torch.arange(entries.shape[1]) < counts[:, None]
    inside &= (scale != 0)[:, None]
    i, k = inside.nonzero(as_tuple=True)
    columns, values = unpacked(entries[i, k])
    at = ((target >= 0) & (target < vocab) & (target_scale != 0)).nonzero()[:, 0]
    columns = torch.cat([columns, target[at]])
    tokens, values = torch.cat([i, at]), torch.cat([scale[i] * values, target_scale[at]])
    by_class = (columns * len(counts) + tokens).argsort()
    tokens = order[tokens] if maps else tokens
    class_counts[:] = columns.bincount(minlength=vocab)
    ends[0] = 0
    ends[1:] = class_counts.cumsum(0)
    out[:] = -1
    out[: len(by_class)] = packed(tokens[by_class], values[by_class])


def sparse_rows(kernel: spec.SparseRowsSpec, out: Tensor, table: Tensor, lists: Any) -> None:
    assert str(out.dtype) == f"torch.{kernel.out or kernel.dtype}"
    (_hidden_rows if kernel.wrt == "hidden" else _weight_rows)(kernel, out, table, lists)


def _hidden_rows(_: spec.SparseRowsSpec, out: Tensor, table: Tensor, lists: Any) -> None:
    entries, counts, scale, target_scale, target, order, scatters = lists
    assert len(out) == len(counts)
    inside = torch.arange(entries.shape[1]) < counts[:, None]
    columns, values = unpacked(entries)
    i, k = inside.nonzero(as_tuple=True)
    sums = torch.zeros(out.shape).index_add_(
        0, i, values[i, k, None] * table[columns[i, k]].float()
    )
    at = table[target.clamp(0, len(table) - 1)].float()
    total = scale[:, None] * sums
    total += torch.where((target_scale != 0)[:, None], target_scale[:, None] * at, 0)
    out[order if scatters else slice(None)] = total.to(out.dtype)


def _weight_rows(kernel: spec.SparseRowsSpec, out: Tensor, table: Tensor, lists: Any) -> None:
    entries, ends, start, bias = lists
    assert (bias is not None) == kernel.bias and len(ends) == len(out) + 1
    begin, end = int(ends[0]), int(ends[-1])
    tokens, values = unpacked(entries[begin:end])
    classes = torch.repeat_interleave(torch.arange(len(out)), ends.diff().long())
    sums = torch.zeros(out.shape).index_add_(0, classes, values[:, None] * table[tokens].float())
    sums, total = sums + start, torch.zeros(len(out)).index_add_(0, classes, values) + start
    written = ends.diff() > 0
    written |= not kernel.adds or float(start) != 0
    before = out.float() if kernel.adds else 0
    out[:] = torch.where(written[:, None], (before + sums).to(out.dtype), out)
    if bias is not None:
        bias[:] = torch.where(written, total + (bias if kernel.adds else 0), bias)
