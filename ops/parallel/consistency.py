"""Whether the ranks of a group make the same call.

Collectives of different sizes, or in another order, hang or mix what they are given.  So ranks tell
each other what they are about to do, through the group's store, which waits for no device: on a CPU
in every operator; on a GPU only what is new, since a store serves few requests at a time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group


@dataclass
class StoreRounds:
    """What this process has exchanged with the ranks of one group."""

    count: int = 0
    known: set[str] = field(default_factory=set)


_rounds: WeakKeyDictionary[dist.ProcessGroup, StoreRounds] = WeakKeyDictionary()


def ranks(group: str | None, shards: Sequence[int] | None, sequence_parallel: bool) -> int:
    """Return the number of ranks that a call is shared among; raise for what needs a group."""
    if group is not None:
        return resolve(group).size()
    for name, value in (("shards", shards), ("sequence_parallel", sequence_parallel)):
        if value:
            raise ValueError(f"{name}: got {value} without a group, expected a group")
    return 1


def check_shards(group: str | None, shards: Sequence[int] | None, w: Tensor) -> None:
    """Raise ValueError unless `shards` are sizes of all ranks' weights, w (V_k, D) being here."""
    if group is None or shards is None:
        return
    process_group = resolve(group)
    rank, ranks = process_group.rank(), process_group.size()
    if len(shards) != ranks or min(shards) < 1 or shards[rank] != w.shape[0]:
        raise ValueError(
            f"shards: got {list(shards)}, expected the rows of w of {ranks} ranks, each at least "
            f"1, and {w.shape[0]} for rank {rank}"
        )


def resolve(group: str) -> dist.ProcessGroup:
    """Return the process group of this name, of which this rank is a member."""
    try:
        return _resolve_process_group(cast(Any, group))  # a str of torch's own kind
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"group: got {group!r}, expected the name of a process group that this rank is in"
        ) from error


def exchange(
    process_group: dist.ProcessGroup, mine: dict[str, Any], *, cached: bool
) -> list[dict[str, Any]]:
    """Exchange a few values with all ranks of the group, in whose timeout they must come.

    `cached` takes ranks that told the same before to tell the same again: since all that a rank
    tells holds for every rank, either all of them ask or none does.

    Raises:
        RuntimeError: if another rank does not come, or failed before.
    """
    rounds = _rounds.setdefault(process_group, StoreRounds())
    text = json.dumps(mine)
    if cached and text in rounds.known:
        return [mine]
    number, store = _publish(process_group, text), process_group.get_group_store()
    keys = [_key(number, rank) for rank in range(process_group.size())]
    timeout = process_group._get_backend(process_group._device_types[0]).options._timeout
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"group: a rank did not make the call that rank {process_group.rank()} made, "
            f"{mine}, within the group's timeout"
        ) from error
    told = [json.loads(text) for text in store.multi_get(keys)]
    # all came, so that all have read what was told before
    store.delete_key(_key(number - 1, process_group.rank()))
    for rank, other in enumerate(told):
        if "error" in other:
            raise RuntimeError(f"group: rank {rank} failed: {other['error']}")
        if other.get("operator") != mine["operator"]:
            raise RuntimeError(
                f"group: rank {rank} called {other.get('operator')} while rank "
                f"{process_group.rank()} called {mine['operator']}"
            )
    if all(other == mine for other in told):
        rounds.known.add(text)
    return told


@dataclass
class report_errors:
    """A block that tells the ranks of `group`, who will ask for this one's values, why it failed.

    Every call enters it: a generator's context would take 2 us of the host's time.
    """

    group: str | None

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tell of what a user can cause."""
        if self.group is not None and isinstance(error, TypeError | ValueError):
            _publish(resolve(self.group), json.dumps({"error": f"{type(error).__name__}: {error}"}))


def _publish(process_group: dist.ProcessGroup, text: str) -> int:
    """Write this rank's values down and return the number of the meeting."""
    rounds = _rounds.setdefault(process_group, StoreRounds())
    number, rounds.count = rounds.count, rounds.count + 1
    store, rank = process_group.get_group_store(), process_group.rank()
    store.set(_key(number, rank), text)
    return number


def _key(number: int, rank: int) -> str:
    return f"cutefce/{number}/{rank}"
