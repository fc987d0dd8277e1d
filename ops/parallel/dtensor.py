"""Distributed tensors to the plain tensors and the group of a sharded call."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops import torch_compat
from cutefce.ops.interface.arguments import TensorOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FSDP_HINT = (
    "if FSDP2 has sharded the parameter, call in the forward of its unit, where it is whole"
)


class LocalCall(NamedTuple):
    """This rank's arguments of `torch.ops.cutefce.loss`."""

    h: Tensor
    w: Tensor
    y: Tensor
    options: dict[str, Any]
    """The others by name, as far as they are given."""
    dim: int
    """Dimension of the user's y, and of an unreduced loss, that is the first one here."""


def localize(h: Tensor, w: Tensor, y: Tensor, given: dict[str, Any]) -> LocalCall:
    """Return this rank's part of the tensors, and the group that their placements select.

    Args:
        h: (..., D), plain, replicated, or sharded over a dimension of tokens.
        w: (V, D), plain, or sharded over V, which selects a group if `h` is distributed too: by its
            placements alone, a parameter that FSDP2 has sharded looks the same.
        y: (...), plain or replicated.
        given: the other arguments of the call, by name.  Of these `group` is for a plain w, or for
            a plain h beside a sharded w, `shards` for a plain w, `sequence_parallel` for a plain h.

    Raises:
        TypeError, ValueError: naming the argument; on every rank, because all know all placements.
    """
    if not torch_compat.is_dtensor(w):
        return LocalCall(h, w, y, _local_options(given, 0), 0)
    _check_weight(w)
    group: ProcessGroup | None = given.get("group")
    sequence_parallel: bool = given.get("sequence_parallel", False)
    name = w.device_mesh.get_group().group_name
    if group is None and not torch_compat.is_dtensor(h):
        raise TypeError(
            f"linear_weight: got a DTensor with placements {w.placements} beside a plain input; "
            f"{_FSDP_HINT}; if its vocabulary is sharded, also pass "
            "group=linear_weight.device_mesh.get_group(), or input as a DTensor of the same mesh"
        )
    if group is not None and group.group_name != name:
        raise ValueError(
            f"group: got {group.group_name!r}, expected None or that of linear_weight's mesh"
        )
    dim = 0
    for argument, x in (("input", h), ("target", y)):
        if torch_compat.is_dtensor(x) and x.device_mesh != w.device_mesh:
            raise ValueError(
                f"{argument}: got {x.device_mesh}, expected that of linear_weight, {w.device_mesh}"
            )
    if torch_compat.is_dtensor(h):
        placement: Any
        (placement,) = h.placements
        if placement.is_shard() and 0 <= placement.dim < h.ndim - 1:
            sequence_parallel, dim = True, placement.dim
        elif not placement.is_replicate() or sequence_parallel:
            raise TypeError(
                f"input: got a DTensor with placements {h.placements}, expected (Shard(dim),) of "
                "tokens, or (Replicate(),) without sequence_parallel"
            )
        h = h.to_local().movedim(dim, 0)
    y = replicated("target", y)
    if dim >= y.ndim:
        raise ValueError(
            f"target: got shape {tuple(y.shape)}, expected that of input without its last "
            f"dimension, of which dimension {dim} is sharded"
        )
    y = y.movedim(dim, 0)
    options = {"shards": _shards(w), **_local_options(given, dim), "group": name}
    options["sequence_parallel"] = sequence_parallel
    return LocalCall(h, w.to_local(), y, options, dim)


def replicated(name: str, x: Tensor) -> Tensor:
    """Return the plain tensor of x, the argument `name`, which is plain or replicated.

    Raises:
        TypeError: for another placement; on every rank.
    """
    if not torch_compat.is_dtensor(x):
        return x
    if not all(placement.is_replicate() for placement in x.placements):
        raise TypeError(
            f"{name}: got a DTensor with placements {x.placements}, expected Replicate(); "
            f"pass {name}.full_tensor()"
        )
    return x.to_local()


def _local_options(given: dict[str, Any], dim: int) -> dict[str, Any]:
    """Return arguments as operators take them: plain tensors, the first of them of dimension `dim`.

    Groups are names, shards lists.
    """
    local = dict(given)
    for name, x in given.items():
        if name == "group":
            local[name] = x.group_name
        elif name == "shards":
            local[name] = list(x)
        elif not isinstance(x, Tensor):
            continue
        elif name not in TensorOptions.OF_CLASSES:
            x = replicated(name, x)
            local[name] = x.movedim(dim, 0) if 0 < dim < x.ndim else x
        elif torch_compat.is_dtensor(x):
            if not _is_sharded(x):
                raise TypeError(
                    f"{name}: got a DTensor with placements {x.placements}, expected "
                    "(Shard(0),), as of linear_weight"
                )
            local[name] = x.to_local()
    return local


def _is_sharded(x: "DTensor") -> bool:
    """Whether the rows of x are shared by the ranks of one dimension of a mesh."""
    return len(x.placements) == 1 and x.placements[0].is_shard(0)


def _shards(w: "DTensor") -> list[int]:
    """Return the rows of every rank's part; only the last may be smaller."""
    rows = ceil_div(w.shape[0], w.device_mesh.size())
    return [int(min(rows, w.shape[0] - start)) for start in range(0, w.shape[0], rows)]


def _check_weight(w: "DTensor") -> None:
    if not _is_sharded(w):
        raise TypeError(
            f"linear_weight: got a DTensor with placements {w.placements}, expected (Shard(0),) "
            f"over a mesh of one dimension; pass linear_weight.full_tensor(), or, {_FSDP_HINT}"
        )
