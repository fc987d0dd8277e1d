"""What ranks tell each other before they exchange tensors, and what is left of it afterwards."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import cutefce
from cutefce.ops.parallel.consistency import StoreRounds, _rounds_of, exchange
from tests.support.ranks import Ranks, each_value, group, mesh, started
from tests.support.tiers import rest_slow

H, W = (torch.linspace(-9, 9, rows * 8).sin().view(rows, 8) for rows in (8, 10))
Y = torch.tensor([0, 1, 2, 9, 4, 5, -100, 7])


def outcome(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> str:
    """Return the loss, or what was raised, as text."""
    try:
        return f"{function(*arguments, **options).item()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing_call(given: dict[str, Any], failing: int) -> tuple[float, str, str]:
    """Call, with `given` on one rank, and again; return the seconds and both outcomes."""
    w = W.split(5)[dist.get_rank()].clone().requires_grad_()
    good: dict[str, Any] = {"input": H, "linear_weight": w, "target": Y, "group": group(2)}
    bad = good | given if dist.get_rank() == failing else good
    begin = time.monotonic()
    first = outcome(cutefce.linear_cross_entropy, **bad)
    seconds = time.monotonic() - begin
    return seconds, first, outcome(cutefce.linear_cross_entropy, **good)


REFUSED: dict[str, dict[str, Any]] = {
    "a float workspace": {"workspace": 2.5},
    "an integer beyond int64": {"workspace": 1 << 64},
    "no reduction": {"reduction": None},
    "an unserved option": {"options": object()},
    "no target": {"target": None},
    "a list": {"input": [[0.0] * 8]},
    "another dtype": {"input": H.double()},
    "a target of floats": {"target": Y.float()},
    "a target of another shape": {"target": Y[:3]},
    "a denominator of another shape": {"denominator": torch.ones(2)},
}


@each_value(given=REFUSED, failing=[0, 1])
def test_error_before_the_operator_reaches_every_rank(
    given: dict[str, Any], failing: int, ranks: Ranks
) -> None:
    outcomes = ranks.run(2, failing_call, given, failing)
    for seconds, first, second in outcomes:
        assert seconds < 30, "well below the group's timeout"
        assert "Error: " in first
        assert second == outcomes[0][2] and float(second) > 0
    own, other = outcomes[failing][1], outcomes[1 - failing][1]
    assert own in other and f"rank {failing}" in other


def placed_call(plain: bool) -> str:
    """Call with distributed tensors; on rank 1 with a plain input if `plain`."""
    tp = mesh()["tp"]
    h: Tensor = DTensor.from_local(H, tp, [Replicate()])
    w = DTensor.from_local(W, tp, [Shard(0)])
    h = H if plain and tp.get_local_rank() == 1 else h
    return outcome(cutefce.linear_cross_entropy, h, w, Y)


def test_error_of_one_rank_reaches_the_group_of_a_distributed_weight(ranks: Ranks) -> None:
    for text in ranks.run(4, placed_call, True):
        assert text.startswith("TypeError: linear_weight: got a DTensor")
    (loss,) = set(ranks.run(4, placed_call, False))
    assert float(loss) > 0


def failing_module() -> str:
    """Return what a module with a distributed head raises, whose input is wrong on one rank."""
    head, tp = cutefce.LinearCrossEntropyLoss(8, 10), mesh()["tp"]
    rank = tp.get_local_rank()
    head.linear.weight = torch.nn.Parameter(DTensor.from_local(W.split(5)[rank], tp, [Shard(0)]))
    h = DTensor.from_local(H[:, : 8 - rank].contiguous(), tp, [Replicate()])
    return outcome(head, h, Y)


def test_error_of_a_module_reaches_every_rank(ranks: Ranks) -> None:
    for text in ranks.run(4, failing_module):
        assert text.startswith("ValueError: input: got shape (8, 7), expected (..., 8)"), text


def planned() -> str:
    """Return the outcome of a call, before which one rank has asked for plans in vain."""
    w = W.split(5)[dist.get_rank()]
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match=r"^workspace: got 'x'"):
            cutefce.plan(H, w, group=group(2), workspace="x")
        with pytest.raises(ValueError, match=r"^workspace: got 'x'"):
            cutefce.plan_divergence(H, w, H, w, group=group(2), workspace="x")
    return outcome(cutefce.linear_cross_entropy, H, w, Y, group=group(2))


def test_a_plan_tells_other_ranks_nothing(ranks: Ranks) -> None:
    first, second = ranks.run(2, planned)
    assert first == second and float(first) > 0


def failing_backward(of_teacher: bool) -> str:
    """Return what a backward raises, of a divergence or a loss, whose weight rank 1 has changed."""
    own = W.split(5)[dist.get_rank()]
    h, w = H.clone().requires_grad_(), own.clone().requires_grad_()
    if of_teacher:
        loss = cutefce.linear_divergence(h, w, H, own, group=group(2))
    else:
        loss = cutefce.linear_cross_entropy(h, w, Y, group=group(2))
    if dist.get_rank() == 1:
        with torch.no_grad():
            w.add_(1)
    return outcome(lambda: torch.autograd.grad(loss, h)[0].sum())


@pytest.mark.parametrize("of_teacher", [False, True])
def test_error_before_the_backward_reaches_every_rank(of_teacher: bool, ranks: Ranks) -> None:
    first, second = ranks.run(2, failing_backward, of_teacher)
    assert "modified by an inplace operation" in second
    assert first.startswith(f"RuntimeError: group: rank 1 failed: {second[:60]}")


def met_again() -> list[str]:
    """Return the outcomes of rounds, as on a GPU, of which rank 1 fails in the second."""
    rounds = []
    for step in range(4):
        if step == 1 and dist.get_rank() == 1:
            rounds.append(outcome(cutefce.linear_cross_entropy, H, W[5:], None, group=group(2)))
            continue
        try:
            mine = {"operator": "forward", "step": step if step == 1 else 0}
            rounds.append(str(len(exchange(group(2), mine, cached=True))))
        except Exception as error:
            rounds.append(type(error).__name__)
    return rounds


def test_ranks_meet_again_after_an_error_although_they_agreed_before(ranks: Ranks) -> None:
    """A rank that goes on from its error must not find the others one call behind."""
    for first, failed, after, known in ranks.run(2, met_again):
        assert first in ("1", "2") and "Error" in failed
        assert (after, known) == ("2", "1")


def left_in_store() -> list[str]:
    """Return the keys that calls, good, different and refused, have left in the group's store."""
    own = W.split(5)[dist.get_rank()]
    for given in ({}, {"denominator": 1.0 + dist.get_rank()}, {"workspace": dist.get_rank() - 1}):
        outcome(cutefce.linear_cross_entropy, H, own, Y, group=group(2), **given)
    dist.barrier(group(2))
    store = group(2).get_group_store()
    lives = {"group", _rounds_of(group(2)).life}
    assert len(lives) == 2
    rounds = [f"cutefce/{life}/{number}" for life in lives for number in range(200)]
    keys = [f"{key}/{name}" for key in rounds for name in (0, 1, "left")]
    return [key for key in keys if store.check([key])]


def test_finished_rounds_leave_nothing_in_the_store(ranks: Ranks) -> None:
    assert ranks.run(2, left_in_store) == [[], []]


def test_round_that_is_given_up_leaves_earlier_errors_to_be_read() -> None:
    store, soon = HashStore(), timedelta(milliseconds=50)
    one, other = (StoreRounds(store, rank, 2) for rank in range(2))
    one.leave(one.publish("error"))
    with pytest.raises(RuntimeError):
        one.read(one.publish("next"), soon)
    assert other.read(other.publish("late"), soon) == ["error", "late"]
    other.leave(0)
    assert one.publish("again") == other.publish("again") == 1
    assert one.read(1, soon) == other.read(1, soon) == ["again", "again"]
    assert not store.check(["cutefce/group/0/0"]) and not store.check(["cutefce/group/0/left"])


@pytest.mark.parametrize("named", [False, True])
def test_group_that_is_closed_takes_back_errors_that_a_later_one_could_hear(named: bool) -> None:
    """Those of a life that ranks have named stay: no other group reads its keys."""
    store, soon = HashStore(), timedelta(milliseconds=50)
    one, other = (StoreRounds(store, rank, 2) for rank in range(2))
    if named:
        for rounds in (one, other):
            rounds.publish("first")
        for rounds in (one, other):
            rounds.read(0, soon)
            rounds.leave(0)
            rounds.name_life()
    number = one.publish("error")
    one.leave(number)
    one.close()
    other.publish("late")
    if named:
        assert other.read(number, soon) == ["error", "late"]
    else:
        with pytest.raises(RuntimeError):
            other.read(number, soon)
        assert not store.check(["cutefce/group/0/left"])
    later = [StoreRounds(store, rank, 2) for rank in range(2)]
    for rounds in later:
        rounds.publish("later")
    assert [rounds.read(0, soon) for rounds in later] == [["later", "later"]] * 2


def after_one_sided_errors() -> tuple[list[str], float, str]:
    """Return outcomes of calls after an error and a timeout of rank 0, which is ahead of rank 1.

    Rank 0 then raises again and drops its group: also return when rank 1 hears of it, and what.
    """
    rank = dist.get_rank()
    one: Any = {"group": dist.new_group([0, 1], timeout=timedelta(seconds=3))}
    own, outcomes = W.split(5)[rank], []

    def call(target: Tensor = Y) -> str:
        return outcome(cutefce.linear_cross_entropy, H, own, target, **one)

    outcomes.append(call())
    if rank == 0:
        assert "TypeError" in call(Y.float())
        assert "within the group's timeout" in call()
    dist.barrier()
    if rank == 1:
        outcomes.append(call())
    outcomes += [call() for _ in range(2)]
    dist.barrier()
    begin, last = time.monotonic(), ""
    if rank == 0:
        call(Y.float())
        dist.destroy_process_group(one.pop("group"))
    dist.barrier()
    if rank == 1:
        last = call()
    seconds = time.monotonic() - begin
    dist.barrier()
    return outcomes, seconds, last


@pytest.mark.slow
def test_ranks_meet_again_after_an_error_and_a_timeout_of_one_of_them() -> None:
    with started(2) as two:
        (first, _, _), (second, seconds, last) = two.run(2, after_one_sided_errors)
    assert first == 3 * first[:1] and float(first[0]) > 0
    assert second[0] == second[2] == second[3] == first[0]
    assert second[1].startswith("TypeError: target: got dtype torch.float32")
    assert last.startswith("TypeError: target: got dtype torch.float32") and seconds < 2


class KeptStore(Store):
    """The store of a launcher's agent, which outlives groups; backends' own keys do not matter."""

    def __init__(self, store: Store, life: int) -> None:
        super().__init__()
        self.kept, self.life = store, life

    def name(self, key: str) -> str:
        return key if "cutefce" in key else f"{self.life}/{key}"

    def set(self, key: str, value: Any) -> None:
        self.kept.set(self.name(key), value)

    def get(self, key: str) -> bytes:
        return self.kept.get(self.name(key))

    def add(self, key: str, value: int) -> int:
        return self.kept.add(self.name(key), value)

    def check(self, keys: list[str]) -> bool:
        return self.kept.check([self.name(key) for key in keys])

    def deleteKey(self, key: str) -> bool:
        return self.kept.delete_key(self.name(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.kept.multi_get([self.name(key) for key in keys])

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.kept.wait([self.name(key) for key in keys], *timeout)


def lives(path: str, with_error: bool) -> list[str]:
    """Return the losses of three process groups of this process, one after another.

    `with_error` replaces the first one's loss by an error of one rank.
    """
    rank, kept = dist.get_rank(), FileStore(path, 2)
    dist.destroy_process_group()
    losses = []
    for life, tokens in enumerate((6, 5, 6)):
        timeout = timedelta(seconds=20)
        store = KeptStore(kept, life)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
        if life % 2 == rank:
            time.sleep(0.5)
        sharing: Any = {"group": dist.group.WORLD}
        own = W.split(5)[rank]
        if life == 0 and rank == 0 and with_error:  # which no other rank reads
            outcome(cutefce.linear_cross_entropy, H[:tokens], own, Y, workspace=1.5, **sharing)
        if life == 0 and with_error:
            dist.barrier()
            del sharing  # with the last reference, the group takes back what nobody read
            dist.destroy_process_group()
            continue
        losses.append(outcome(cutefce.linear_cross_entropy, H[:tokens], own, Y[:tokens], **sharing))
        dist.destroy_process_group()
    return losses


@pytest.mark.parametrize("with_error", rest_slow([True, False]))
def test_process_group_after_another_one_in_a_store_that_was_kept(
    with_error: bool, tmp_path: Any
) -> None:
    with started(2) as two:
        first, second = two.run(2, lives, str(tmp_path / "kept"), with_error)
    assert first == second and len(first) == 3 - with_error
    assert all(float(loss) > 0 for loss in first)
    assert first[0] != first[1]


def backwards(case: str) -> str:
    """Return what the backward of calls raises that ranks make differently."""
    rank = dist.get_rank()
    own = W.split(5)[rank].clone().requires_grad_()
    hidden = [H.clone().requires_grad_(), H.flip(0).contiguous().requires_grad_()]
    options: dict[str, Any] = {"group": group(2), "reduction": "sum"}
    losses = [cutefce.linear_cross_entropy(h, own, Y, **options) for h in hidden]
    try:
        if case == "scale":
            (losses[0] * (rank + 1)).backward()
        for i in ((0, 1), (1, 0))[rank] if case == "order" else ():
            losses[i].backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("case", "message"),
    [("scale", "ValueError: gradient of the loss"), ("order", "ValueError: losses of the forward")],
)
def test_backwards_that_differ_raise(case: str, message: str, ranks: Ranks) -> None:
    for text in ranks.run(2, backwards, case):
        assert text.startswith(message)


def own_losses() -> str:
    """Return what a rank raises that sums the losses of its own tokens."""
    rank = dist.get_rank()
    h, own = H[4 * rank :][:4].clone().requires_grad_(), W.split(5)[rank]
    options: dict[str, Any] = {"group": group(2), "sequence_parallel": True, "reduction": "none"}
    losses = cutefce.linear_cross_entropy(h, own, Y, **options)
    try:
        losses[4 * rank :][:4].sum().backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_gradients_of_other_losses_raise(ranks: Ranks) -> None:
    for text in ranks.run(2, own_losses):
        assert text.startswith("gradient of the loss: got torch.float32 of shape (8,) with hash")


def test_round_that_is_given_up_is_tried_again() -> None:
    store = HashStore()
    one, other = (StoreRounds(store, rank, 2) for rank in range(2))
    with pytest.raises(RuntimeError):  # the other rank skipped this call
        one.read(one.publish("first"), timedelta(milliseconds=50))
    numbers = one.publish("second"), other.publish("second")
    assert numbers == (0, 0)
    assert one.read(0, timedelta(seconds=1)) == ["second", "second"]


def test_fake_group_is_refused_and_serves_fake_tensors() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        h, w = H.clone().requires_grad_(), W[:5].clone().requires_grad_()
        sharing: Any = {"group": dist.group.WORLD}
        with pytest.raises(ValueError, match="group: got one of the backend 'fake'"):
            cutefce.linear_cross_entropy(h, w, Y, **sharing)
        with pytest.raises(ValueError, match="reduction"):
            cutefce.linear_cross_entropy(h, w, Y, reduction="all", **sharing)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            h, w, y = (mode.from_tensor(x) for x in (h, w, Y))
            loss = cutefce.linear_cross_entropy(h, w, y, **sharing)
            dx, dw = torch.autograd.grad(loss, (h, w))
        assert (loss.shape, dx.shape, dw.shape) == ((), (8, 8), (5, 8))
    finally:
        dist.destroy_process_group()
