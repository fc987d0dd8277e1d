"""Torch models of the kernels of sampled gradients, see `kernel_models`."""

import math
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels import spec
from cutefce.ops.sampling.random_bits import COLUMN, _mix_, _signed, row_states

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]
MASK = 0xFFFFFFFF


def packed(index: Tensor, value: Tensor) -> Tensor:
    """Return entries (.., K) int64."""
    return index.long() << 32 | value.float().contiguous().view(torch.int32).long() & MASK


def unpacked(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of entries."""
    return entries >> 32, (entries & MASK).to(torch.int32).view(torch.float32)


def prepare_samples(
    _: spec.PrepareSamplesSpec,
    partials: Tensor,
    reference: Tensor,
    order: Tensor,
    seed: Tensor,
    threshold: Tensor,
    row_hash: Tensor,
    counts: Tensor,
    log2_ratio: float,
    log2_samples: float,
    selects: int,
) -> None:
    sums = torch.nn.functional.pad(partials + log2_ratio, (1, 0)) * math.log(2)
    estimate = (reference + sums.logsumexp(1)) / math.log(2)
    threshold[:] = torch.where(reference == torch.inf, torch.inf, estimate - log2_samples - 32)
    tokens = order if selects else torch.arange(len(reference))
    row_hash[:] = row_states(seed, tokens) ^ seed[1]
    counts.zero_()


def sample(u: Tensor, columns: Tensor, scale: Tensor | None, samples: tuple[Any, ...]) -> None:
    """Append what is kept of u (R, C), in an order of its own."""
    threshold, row_hash, counts, entries, shard_start = samples
    rows, capacity = len(u), entries.shape[1]
    keys = (columns + shard_start).to(torch.int32) * _signed(COLUMN)
    bits = _mix_(row_hash[:rows, None] ^ keys).to(torch.int64) & MASK
    limit = torch.exp2(u / math.log(2) - threshold[:rows, None])
    if scale is not None:
        limit = limit * (1 - (u / scale[:rows, None]) ** 2).clamp(min=0)
    kept = bits.float() < limit
    for row in range(rows):
        found = kept[row].nonzero()[:, 0].flip(0)
        counts[row] += len(found)
        own = found[:capacity]
        entries[row, : len(own)] = packed(columns[own], u[row, own])


def sort_samples(
    kernel: spec.SortSamplesSpec,
    entries: Tensor,
    counts: Tensor,
    threshold: Tensor,
    reference: Tensor,
    row_scale: Tensor | None,
) -> None:
    assert (row_scale is not None) == kernel.softcap and entries.shape[1] <= kernel.size
    counts[counts > entries.shape[1]] = -1
    for row, count in enumerate(counts.tolist()):
        if count <= 0:
            continue
        columns, u = unpacked(entries[row, :count].sort().values)
        value = (u - reference[row]).exp()
        if row_scale is not None:
            value = value * (1 - (u / row_scale[row]) ** 2).clamp(min=0)
        least = ((threshold[row] + 32) * math.log(2) - reference[row]).exp()
        entries[row, :count] = packed(columns, torch.maximum(value, least))


def list_samples(_: spec.ListSamplesSpec, rows: Rows, lists: tuple[Tensor, ...]) -> None:
    entries, counts, target, scale, target_scale, order, maps = rows
    out, ends, slots, class_counts = lists
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
