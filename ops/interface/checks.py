"""Checks of a call's arguments, made before anything is allocated.

Other errors are raised elsewhere: placements of DTensors in `ops.parallel.dtensor`, disagreement
of ranks in `ops.parallel.shard` and `ops.parallel.consistency`, targets outside the vocabulary in
`ops.primitives.rows` and, across ranks, in `ops.parallel.primitives`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.ops import torch_compat
from cutefce.ops.planning import planner

DTYPES = {getattr(torch, name) for name in ITEM_BYTES}
REDUCTIONS = ("mean", "sum", "none")
UNSERVED_DEFAULTS: dict[str, Any] = {"label_smoothing": 0.0, "out_features": (), "bias": False}
"""Defaults, where they are not None, of arguments that are not served yet."""


def check_tensors(h: Tensor, w: Tensor, y: Tensor, parts: int = 1) -> None:
    """Raise TypeError or ValueError unless h (..., D), w (V, D) and y (...) fit together.

    `parts` is the number of ranks whose h, one after another, have the tokens of y.
    """
    for name, x in (("h", h), ("w", w), ("y", y)):
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name}: got a DTensor with placements {x.placements}, expected a plain tensor; "
                f"pass {name}.full_tensor(), or call cutefce.linear_cross_entropy with w sharded "
                "over the vocabulary"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name}: got layout {x.layout}, expected {torch.strided}")
    _check_dtypes(h, w, y)
    _check_shapes(h, w, y, parts)
    for name, x in (("w", w), ("y", y)):
        if x.device != h.device:
            raise ValueError(f"{name}: got device {x.device}, expected that of h, {h.device}")


def _check_dtypes(h: Tensor, w: Tensor, y: Tensor) -> None:
    if h.dtype not in DTYPES:
        raise TypeError(f"h: got dtype {h.dtype}, expected one of {', '.join(ITEM_BYTES)}")
    if w.dtype != h.dtype:
        raise TypeError(
            f"w: got dtype {w.dtype}, expected that of h, {h.dtype}; "
            "cast one of them, or call under torch.autocast"
        )
    if y.dtype == torch.bool or y.is_floating_point() or y.is_complex():
        raise TypeError(f"y: got dtype {y.dtype}, expected integers (class indices)")


def _check_shapes(h: Tensor, w: Tensor, y: Tensor, parts: int) -> None:
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(
            f"w: got shape {tuple(w.shape)}, expected (V, D) with V >= 1 and D >= 1; "
            "a sharded parameter must be gathered first"
        )
    if h.ndim == 0 or h.shape[-1] != w.shape[1]:
        raise ValueError(
            f"h: got shape {tuple(h.shape)}, expected (..., {w.shape[1]}) "
            f"to match w of shape {tuple(w.shape)}"
        )
    tokens: tuple[int, ...] = h.shape[:-1]
    if parts > 1:
        if h.ndim == 1:
            raise ValueError(f"h: got shape {tuple(h.shape)}, expected a dimension of tokens first")
        tokens = parts * tokens[0], *tokens[1:]
    if y.shape != tokens:
        shared = f", of which {parts} ranks hold a part each" if parts > 1 else ""
        raise ValueError(
            f"y: got shape {tuple(y.shape)}, expected {tuple(tokens)} "
            f"to match h of shape {tuple(h.shape)}{shared}"
        )


def check_reduction(reduction: str) -> None:
    """Raise ValueError for an unknown reduction."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}, expected one of {REDUCTIONS}")


def check_denominator(denominator: Tensor | None, h: Tensor, reduction: str) -> None:
    """Raise ValueError unless it is () on h's device, for "mean"."""
    if denominator is None:
        return
    if reduction != "mean":
        raise ValueError(f'denominator: got one with reduction={reduction!r}, expected "mean"')
    if denominator.requires_grad:
        raise ValueError("denominator: got one that requires grad, expected denominator.detach()")
    if denominator.shape != () or denominator.device != h.device:
        raise ValueError(
            f"denominator: got shape {tuple(denominator.shape)} on {denominator.device}, "
            f"expected () on h's device, {h.device}"
        )


def workspace_bytes(workspace: int | str | None) -> int:
    """Return the budget in bytes that `workspace` means: bytes, "min", "max" or None."""
    if isinstance(workspace, str):
        named = {"min": planner.MINIMUM, "max": planner.MAXIMUM}
        if workspace not in named:
            raise ValueError(f'workspace: got {workspace!r}, expected bytes, "min", "max" or None')
        return named[workspace]
    if workspace is None:
        return planner.DEFAULT
    if workspace < 0:
        raise ValueError(f"workspace: got {workspace}, expected bytes >= 0")
    return workspace


def rank_count(group: str | None, shards: Sequence[int] | None, sequence_parallel: bool) -> int:
    """Return the number of ranks that share a call; raise ValueError for what needs a group."""
    if group is not None:
        return torch_compat.resolve_process_group(group).size()
    for name, value in (("shards", shards), ("sequence_parallel", sequence_parallel)):
        if value:
            raise ValueError(f"{name}: got {value} without a group, expected a group")
    return 1


def check_shards(group: str | None, shards: Sequence[int] | None, w: Tensor) -> None:
    """Raise ValueError unless `shards` are sizes of all ranks' weights, w (V_k, D) being here."""
    if group is None or shards is None:
        return
    process_group = torch_compat.resolve_process_group(group)
    rank, ranks = process_group.rank(), process_group.size()
    if len(shards) != ranks or min(shards) < 1 or shards[rank] != w.shape[0]:
        raise ValueError(
            f"shards: got {list(shards)}, expected the rows of w of {ranks} ranks, each at least "
            f"1, and {w.shape[0]} for rank {rank}"
        )


def refuse_unserved(**arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that is not at its default."""
    for name, value in arguments.items():
        default = UNSERVED_DEFAULTS.get(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            got = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(
                f"{name}: got {got}, expected {default!r}; cutefce does not serve it yet"
            )
