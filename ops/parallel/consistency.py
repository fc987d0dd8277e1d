"""Check that the ranks of a group make the same call before they exchange tensors.

Collectives of different sizes or in another order hang, or mix up data.  So ranks first exchange
what they are about to do through the group's store, which needs no device: on a CPU in every
operator, on a GPU only for values that are new, because a store serves few requests at a time.

Each exchange is a round.  When a rank has read a round, all ranks have ended the one before, and it
removes its values of that one.  A store may outlive its group, and ranks number the rounds of every
group from 0: the keys of a group bear its life, which ranks count in the store.
"""

import contextlib
import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from cutefce.ops import torch_compat

COMMON_ERRORS = {e.__name__: e for e in (IndexError, NotImplementedError, TypeError, ValueError)}
"""Errors of one rank that the others raise too; any other one is a RuntimeError there."""


@dataclass
class StoreRounds:
    """The rounds of one group, as this rank sees them."""

    store: "torch_compat.Store"
    rank: int
    ranks: int
    count: int = 0
    """Rounds that this rank has begun."""
    calls: int = 0
    """Exchanges, also those that were skipped, and errors that were published."""
    known: set[str] = field(default_factory=set)
    """Values that all ranks agreed on since the last error of one of them."""
    published: list[str] = field(default_factory=list)
    """Keys of this rank's values in the store."""

    def __post_init__(self) -> None:
        """Count this rank's part in a life of the group."""
        self.life = (self._count_parts(1) - 1) // self.ranks

    def publish(self, text: str) -> int:
        """Begin a round with this rank's values; return its number."""
        number, self.count = self.count, self.count + 1
        self.published.append(self._keys(number)[self.rank])
        self.store.set(self.published[-1], text)
        return number

    def read(self, number: int, timeout: timedelta) -> list[str]:
        """Return the values of all ranks, waiting for them; raise RuntimeError after `timeout`."""
        keys = self._keys(number)
        try:
            self.store.wait(keys, timeout)
        except RuntimeError:
            # the next call tries this round again: the others may have skipped a call
            self.count = number
            with contextlib.suppress(RuntimeError):
                self.store.delete_key(self.published.pop())
            raise
        for key in self.published[:-1]:  # all ranks began this round, so they ended the ones before
            self.store.delete_key(key)
        del self.published[:-1]
        return [text.decode() for text in self.store.multi_get(keys)]

    def close(self) -> None:
        """Take back this rank's part in a life that a later group will begin again.

        That is one in which not all ranks took part.  The store may be gone.
        """
        with contextlib.suppress(RuntimeError):
            if self._count_parts(0) < (self.life + 1) * self.ranks:
                for key in self.published:
                    self.store.delete_key(key)
                self._count_parts(-1)

    def _count_parts(self, more: int) -> int:
        return self.store.add(f"cutefce/{self.ranks}/parts", more)

    def _keys(self, number: int) -> list[str]:
        return [f"cutefce/{self.ranks}/{self.life}/{number}/{rank}" for rank in range(self.ranks)]


_rounds: WeakKeyDictionary[dist.ProcessGroup, StoreRounds] = WeakKeyDictionary()


def exchange(
    process_group: dist.ProcessGroup, mine: dict[str, Any], *, cached: bool
) -> list[dict[str, Any]]:
    """Return the values of all ranks of the group, waiting for them for the group's timeout.

    With `cached`, skip the exchange if these values were agreed on before; ranks hit or miss
    together because the values are identical everywhere.

    Raises:
        ValueError: for a group whose ranks exchange nothing.
        RuntimeError: if another rank does not take part, or makes another call.
        Exception: what another rank raised before its call, if that is one of `COMMON_ERRORS`.
    """
    rounds = _rounds_of(process_group)
    rounds.calls += 1
    text = json.dumps(mine)
    if cached and text in rounds.known:
        return [mine]
    number = rounds.publish(text)
    try:
        texts = rounds.read(number, torch_compat.group_timeout(process_group))
    except RuntimeError as error:
        raise RuntimeError(
            f"group: a rank did not make the call that rank {rounds.rank} made, "
            f"{mine}, within the group's timeout"
        ) from error
    values: list[dict[str, Any]] = [json.loads(text) for text in texts]
    for rank, other in enumerate(values):
        if "error" in other:
            rounds.known.clear()
            kind, message = other["error"]
            if kind in COMMON_ERRORS:
                raise COMMON_ERRORS[kind](f"{message} (raised on rank {rank} of the group)")
            raise RuntimeError(f"group: rank {rank} failed: {kind}: {message}")
        if other["operator"] != mine["operator"]:
            raise RuntimeError(
                f"group: rank {rank} called {other['operator']} while rank {rounds.rank} called "
                f"{mine['operator']}"
            )
    if all(other == mine for other in values):
        rounds.known.add(text)
    return values


class report_errors:
    """Context of a call that tells the ranks of its group what this rank raised before its part.

    Ranks that wait for this one then raise too.  What is raised after the ranks have met is raised
    by all of them, and not reported.
    """

    def __init__(self, group: Any, weight: Any = None) -> None:
        """Begin a call with a group, or its name, and a weight, checked or not."""
        self.rounds = None
        names_one = group is not None or torch_compat.is_dtensor(weight)
        if names_one and not torch.compiler.is_compiling():  # errors there end in the timeout
            self.rounds = _rounds_of_call(group, weight)
            self.calls = self.rounds.calls if self.rounds else 0

    def __enter__(self) -> None:
        """Do no more than `__init__` did."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Publish an error, unless the ranks have met since the call began."""
        rounds = self.rounds
        if rounds is None or rounds.calls > self.calls or not isinstance(error, Exception):
            return
        rounds.calls += 1
        rounds.known.clear()
        with contextlib.suppress(RuntimeError):  # an error of the store must not hide this one
            rounds.publish(json.dumps({"error": [type(error).__name__, str(error)]}))


def _rounds_of(process_group: dist.ProcessGroup) -> StoreRounds:
    rounds = _rounds.get(process_group)
    if rounds is None:
        if torch_compat.is_fake_group(process_group):
            raise ValueError(
                "group: got one of the backend 'fake', whose ranks exchange nothing, expected a "
                "group of real ranks, or fake tensors"
            )
        store, rank = process_group.get_group_store(), process_group.rank()
        rounds = _rounds[process_group] = StoreRounds(store, rank, process_group.size())
        finalize(process_group, rounds.close).atexit = False
    return rounds


def _rounds_of_call(group: Any, weight: Any) -> StoreRounds | None:
    """Return the rounds of the group that a call names, None if it names none."""
    try:
        if isinstance(group, str):
            return _rounds_of(torch_compat.resolve_process_group(group))
        if torch_compat.is_dtensor(weight) and group is None and weight.device_mesh.ndim == 1:
            group = weight.device_mesh.get_group()
        return _rounds_of(group) if isinstance(group, dist.ProcessGroup) else None
    except ValueError:  # the call itself says what is wrong with its group
        return None
