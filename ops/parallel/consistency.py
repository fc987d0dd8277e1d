"""Check that the ranks of a group make the same call before they exchange tensors.

Collectives of different sizes or in another order hang, or mix up data.  So ranks first exchange
what they are about to do through the group's store, which needs no device: on a CPU in every
operator, on a GPU only for values that are new, because a store serves few requests at a time.

Each exchange is a round.  A round that all ranks have read, or raised in, leaves nothing in the
store: a store may outlive its group, and ranks number the rounds of every group from 0.  Keys bear
the name of the group's life as soon as all ranks know it, from each other's tokens: values of an
earlier round are taken back with the group, errors of a later one may still be read.
"""

import contextlib
import hashlib
import json
import secrets
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
    """Keys of rounds of which the store may hold this rank's values."""
    left: set[str] = field(default_factory=set)
    """Those of them that this rank has ended."""
    life: str = ""
    """Name of the group's life, in the keys of its rounds; empty until all ranks know it."""
    tokens: list[str] = field(default_factory=list)
    """Those of all ranks, as last read."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Begins this rank's values, which those of a later group in the same store must not equal."""

    def publish(self, text: str) -> int:
        """Begin a round with this rank's values; return its number."""
        number, self.count = self.count, self.count + 1
        self.published.append(self._key(number))
        self.store.set(f"{self._key(number)}/{self.rank}", f"{self.token} {text}")
        return number

    def read(self, number: int, timeout: timedelta) -> list[str]:
        """Return the values of all ranks, waiting for them; raise RuntimeError after `timeout`."""
        key = self._key(number)
        keys = [f"{key}/{rank}" for rank in range(self.ranks)]
        try:
            self.store.wait(keys, timeout)
        except RuntimeError:
            # the next call tries this round again: the others may have skipped a call
            self.count = number
            with contextlib.suppress(RuntimeError):
                self._retract(key)
            raise
        self.published = [key]  # all ranks began this round, so they ended the ones before
        self.left.clear()
        texts = [text.decode().partition(" ") for text in self.store.multi_get(keys)]
        self.tokens = [token for token, _, _ in texts]
        return [text for _, _, text in texts]

    def close(self) -> None:
        """Remove what a later group would take for its own; the store may be gone."""
        with contextlib.suppress(RuntimeError):
            for key in [key for key in self.published if key.startswith("cutefce/group/")]:
                self._retract(key)

    def leave(self, number: int) -> None:
        """End a round for this rank; the last rank removes it from the store."""
        key = self._key(number)
        self.left.add(key)
        if self.store.add(f"{key}/left", 1) == self.ranks:
            for name in (*range(self.ranks), "left"):
                self.store.delete_key(f"{key}/{name}")

    def name_life(self) -> None:
        """Name the group's life by the tokens that all ranks have read."""
        self.life = self.life or hashlib.blake2b(" ".join(self.tokens).encode()).hexdigest()[:16]

    def _key(self, number: int) -> str:
        return f"cutefce/{self.life or 'group'}/{number}"

    def _retract(self, key: str) -> None:
        """Remove this rank's values, and itself from those who have ended the round."""
        self.published.remove(key)
        value, count = f"{key}/{self.rank}", f"{key}/left"
        if self.store.check([value]) and self.store.get(value).decode().startswith(self.token):
            self.store.delete_key(value)
            if key in self.left and self.store.add(count, -1) == 0:
                self.store.delete_key(count)


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
    rounds.leave(number)
    values: list[dict[str, Any]] = [json.loads(text) for text in texts]
    if not any("error" in other for other in values):  # a rank that raised has read nothing
        rounds.name_life()
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
    by all of them, and not reported.  A class, because entering a generator's context takes more
    CPU time and every call enters this one.
    """

    rounds: StoreRounds | None = None
    calls = 0
    """Those of the rounds when the call began."""

    def __init__(self, group: Any, weight: Any = None) -> None:
        """Begin, with the call's group, or its name, and weight, checked or not."""
        if group is None and not torch_compat.is_dtensor(weight):
            return
        if not torch.compiler.is_compiling():  # what is raised there ends in the timeout
            self.rounds = _rounds_of_call(group, weight)
            self.calls = self.rounds.calls if self.rounds else 0

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Publish an error."""
        if isinstance(error, Exception):
            self.publish(error)

    def publish(self, error: Exception) -> None:
        """Publish an error, unless the ranks have met since the call began."""
        rounds = self.rounds
        if rounds is None or rounds.calls > self.calls:
            return
        rounds.calls += 1
        rounds.known.clear()
        with contextlib.suppress(RuntimeError):  # an error of the store must not hide this one
            text = json.dumps({"error": [type(error).__name__, str(error)]})
            rounds.leave(rounds.publish(text))


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
