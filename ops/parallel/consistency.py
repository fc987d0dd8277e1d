"""Check that the ranks of a group make the same call before they exchange tensors.

Collectives of different sizes or in another order hang, or mix up data.  So ranks first exchange
what they are about to do through the group's store, which needs no device: on a CPU in every
operator, on a GPU only for values that are new, because a store serves few requests at a time.
"""

import json
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from cutefce.ops import torch_compat


@dataclass
class StoreRounds:
    """The exchanges of this process with the ranks of one group."""

    count: int = 0
    known: set[str] = field(default_factory=set)
    """Values that all ranks agreed on before."""


_rounds: WeakKeyDictionary[dist.ProcessGroup, StoreRounds] = WeakKeyDictionary()


def exchange(
    process_group: dist.ProcessGroup, mine: dict[str, Any], *, cached: bool
) -> list[dict[str, Any]]:
    """Return the values of all ranks of the group, waiting for them for the group's timeout.

    With `cached`, skip the exchange if these values were agreed on before; ranks hit or miss
    together because the values are identical everywhere.

    Raises:
        RuntimeError: if another rank does not take part, or failed before.
    """
    rounds = _rounds.setdefault(process_group, StoreRounds())
    text = json.dumps(mine)
    if cached and text in rounds.known:
        return [mine]
    number, store = _publish(process_group, text), process_group.get_group_store()
    keys = [_key(number, rank) for rank in range(process_group.size())]
    try:
        store.wait(keys, torch_compat.group_timeout(process_group))
    except RuntimeError as error:
        raise RuntimeError(
            f"group: a rank did not make the call that rank {process_group.rank()} made, "
            f"{mine}, within the group's timeout"
        ) from error
    values = [json.loads(text) for text in store.multi_get(keys)]
    # every rank is in this round, so all have read those of the round before
    store.delete_key(_key(number - 1, process_group.rank()))
    for rank, other in enumerate(values):
        if "error" in other:
            raise RuntimeError(f"group: rank {rank} failed: {other['error']}")
        if other.get("operator") != mine["operator"]:
            raise RuntimeError(
                f"group: rank {rank} called {other.get('operator')} while rank "
                f"{process_group.rank()} called {mine['operator']}"
            )
    if all(other == mine for other in values):
        rounds.known.add(text)
    return values


@dataclass
class report_errors:
    """Context that publishes a TypeError or ValueError of its block to the ranks of `group`.

    Ranks that wait for this one then raise too.  A class, because entering a generator's context
    takes more CPU time and every call enters this one.
    """

    group: str | None

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Publish a TypeError or ValueError."""
        if self.group is not None and isinstance(error, TypeError | ValueError):
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
            _publish(torch_compat.resolve_process_group(self.group), text)


def _publish(process_group: dist.ProcessGroup, text: str) -> int:
    """Write this rank's values to the store and return the number of the round."""
    rounds = _rounds.setdefault(process_group, StoreRounds())
    number, rounds.count = rounds.count, rounds.count + 1
    store, rank = process_group.get_group_store(), process_group.rank()
    store.set(_key(number, rank), text)
    return number


def _key(number: int, rank: int) -> str:
    return f"cutefce/{number}/{rank}"
