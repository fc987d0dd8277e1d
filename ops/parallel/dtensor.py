"""Distributed tensors to the plain tensors and the group of a sharded call."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from cutefce.cute_kernels.integers import ceil_div


class LocalCall(NamedTuple):
    """This rank's arguments of `torch.ops.cutefce.loss`."""

    h: Tensor
    w: Tensor
    y: Tensor
    group: str | None
    shards: list[int] | None
    sequence_parallel: bool
    dim: int
    """Dimension of the user's y, and of an unreduced loss, that is the first one here."""


def localize(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    group: ProcessGroup | None,
    shards: Sequence[int] | None,
    sequence_parallel: bool,
) -> LocalCall:
    """Return this rank's part of the tensors, and the group that their placements select.

    Args:
        h: (..., D), plain, replicated, or sharded over a dimension of tokens.
        w: (V, D), plain, or sharded over V, which selects a group.
        y: (...), plain or replicated.
        group: for a plain w.
        shards: rows of all ranks' parts of a plain w.
        sequence_parallel: whether a plain h is a share of the tokens.

    Raises:
        TypeError, ValueError: naming the argument; on every rank, because all know all placements.
    """
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group: got {group!r}, expected a ProcessGroup that this rank is in")
    if not isinstance(w, DTensor):
        sizes = None if shards is None else list(shards)
        named = None if group is None else group.group_name
        return LocalCall(h, w, y, named, sizes, sequence_parallel, 0)
    _check_weight(w)
    if group is not None and group.group_name != w.device_mesh.get_group().group_name:
        raise ValueError(f"group: got {group.group_name!r}, expected None or that of w's mesh")
    if shards is not None and list(shards) != _shards(w):
        raise ValueError(f"shards: got {list(shards)}, expected None or those of w, {_shards(w)}")
    ranks, dim = w.device_mesh.size(), 0
    for name, x in (("h", h), ("y", y)):
        if isinstance(x, DTensor) and x.device_mesh != w.device_mesh:
            raise ValueError(f"{name}: got {x.device_mesh}, expected that of w, {w.device_mesh}")
    if isinstance(h, DTensor):
        (placement,) = h.placements
        if isinstance(placement, Shard) and 0 <= placement.dim < h.ndim - 1:
            sequence_parallel, dim = True, placement.dim
            if h.shape[dim] % ranks:
                raise ValueError(
                    f"h: got {h.shape[dim]} in dimension {dim}, expected a multiple of the "
                    f"{ranks} ranks over which it is sharded"
                )
        elif placement != Replicate() or sequence_parallel:
            raise TypeError(
                f"h: got a DTensor with placements {h.placements}, expected (Shard(dim),) of "
                "tokens, or (Replicate(),) without sequence_parallel"
            )
        h = h.to_local().movedim(dim, 0)
    if isinstance(y, DTensor):
        if y.placements != (Replicate(),):
            raise TypeError(
                f"y: got a DTensor with placements {y.placements}, expected (Replicate(),); "
                "pass y.full_tensor()"
            )
        y = y.to_local()
    name = w.device_mesh.get_group().group_name
    return LocalCall(h, w.to_local(), y.movedim(dim, 0), name, _shards(w), sequence_parallel, dim)


def _shards(w: DTensor) -> list[int]:
    """Return the rows of every rank's part; only the last may be smaller."""
    rows = ceil_div(w.shape[0], w.device_mesh.size())
    return [int(min(rows, w.shape[0] - start)) for start in range(0, w.shape[0], rows)]


def _check_weight(w: DTensor) -> None:
    mesh = w.device_mesh
    if w.placements != (Shard(0),):
        raise TypeError(
            f"w: got a DTensor with placements {w.placements}, expected (Shard(0),) over a mesh "
            "of one dimension; pass w.full_tensor()"
        )
    if len(_shards(w)) < mesh.size():
        raise ValueError(
            f"w: got {w.shape[0]} rows over {mesh.size()} ranks, expected some for every rank"
        )
