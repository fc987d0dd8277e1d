"""Sharded calls: arguments and placements, errors on every rank, and CPU overhead."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache import defaults
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.parallel import shard
from cutefce.ops.primitives import dispatch
from tests.support.ranks import Ranks, each_value, group, mesh, started
from tests.support.reference import assert_as_accurate, ours, random_case
from tests.support.tiers import rest_slow

H, W, Y = torch.randn(8, 8), torch.randn(10, 8), torch.tensor([0, 1, 2, 9, 4, 5, -100, 7])


def call(*by_rank: dict[str, Any]) -> Tensor:
    """Call with what is given for this rank, beside two halves of W."""
    rank = dist.get_rank()
    given: dict[str, Any] = {"h": H, "w": W.split(5)[rank], "y": Y, "group": group(2)}
    given |= by_rank[rank]
    h, w, y = (given.pop(name) for name in ("h", "w", "y"))
    w = w.clone().requires_grad_(given.pop("grad", True))
    if "outputs" in given:
        return cutefce.linear_log_probs(h, w, y, **given).log_probs.detach()
    loss: Tensor = cutefce.linear_cross_entropy(h, w, y, **given)
    return loss.detach()


def compiled_calls() -> list[tuple[Tensor, Tensor]]:
    """Return what each call of two ranks with the same parts returns, eager and compiled."""
    rank, both = dist.get_rank(), group(2)
    own, y = W.split(5)[rank], torch.stack([Y, Y], 1)
    heads, teacher = torch.stack([own, own], 1), (H * 2, own + 1)
    half: dict[str, Any] = {"group": both, "sequence_parallel": True}

    def calls(h: Tensor, part: Tensor) -> tuple[Tensor, ...]:
        kept = cutefce.linear_log_probs(h, own, Y, kept_classes=Y[:, None].clamp(0), group=both)
        top = cutefce.linear_log_probs(h, own, Y, top_k=2, group=both)
        lse = cutefce.linear_log_probs(part, own, outputs=["lse"], **half).lse
        positions = cutefce.linear_cross_entropy(part, heads, y, **half)
        divergence = cutefce.linear_divergence(h, own, *teacher, group=both, shards=(5, 5))
        assert top.top_log_probs is not None and lse is not None
        return kept.log_probs, top.top_log_probs, lse, positions, divergence

    torch.compiler.reset()
    compiled = torch.compile(calls, fullgraph=True, backend="aot_eager")
    operands = H, H.split(4)[rank]
    return [*zip(calls(*operands), compiled(*operands), strict=True)]


def test_compiled_calls_know_the_ranks(ranks: Ranks) -> None:
    for results in ranks.run(2, compiled_calls):
        assert all(torch.equal(eager, compiled) for eager, compiled in results)


ONES = torch.ones(10)
OPTIONS: dict[str, tuple[Any, Any]] = {
    "linear_bias": (None, ONES[:5]),
    "weight": (ONES, 2 * ONES),
    "label_smoothing": (0.0, 0.1),
    "token_weights": (None, ONES[:8]),
    "z_loss": (0.0, 1e-4),
    "logit_scale": (1.0, 2.0),
    "softcap": (None, 30.0),
    "temperature": (0.7, torch.tensor(0.9)),
    "outputs": ((), ("lse", "entropy")),
}
"""Values of which each rank has another one."""
SOFT = {"y": None, "target_indices": Y[:, None].clamp(min=0), "target_probs": torch.ones(8, 1)}
BAD_PROB = {"target_probs": torch.tensor([-1.0, *[1.0] * 7])[:, None]}  # of one rank's class
BAD_INDEX = {"target_indices": torch.tensor([0, 10, *[1] * 6])[:, None]}


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens": ({}, {"h": H[:4], "y": Y[:4]}, "rows of input: got"),
    "tokens, without gradients": (
        {"grad": False},
        {"h": H[:4], "y": Y[:4], "grad": False},
        "rows of input: got",
    ),
    "hidden size": ({}, {"h": H[:, :4], "w": W[5:, :4]}, "hidden size: got"),
    "dtype": ({}, {"h": H.double(), "w": W[5:].double()}, "dtype of input: got"),
    "reduction": ({}, {"reduction": "sum"}, "reduction: got"),
    "ignored targets": ({}, {"ignore_index": 5}, "ignore_index: got"),
    "gradients": (
        {},
        {"grad": False},
        r"requires_grad of \(input, .*\): got",
    ),
    "gradients of the weight alone": (
        {"h": H.clone().requires_grad_(), "workspace": "min"},
        {"h": H.clone().requires_grad_(), "workspace": "min", "grad": False},
        r"requires_grad of \(input, .*\): got \[True, .*\] on rank . of the group",
    ),
    "denominators": ({"denominator": 2.0}, {"denominator": 5.0}, r"denominator: got [25].0 \("),
    "a denominator on one rank": ({"denominator": 2.0}, {}, "denominator: got (None|2.0)"),
    "sequence parallelism": (
        {"sequence_parallel": True, "y": torch.cat([Y, Y])},
        {},
        "sequence_parallel: got",
    ),
    "a target outside every shard": (
        {"y": Y + 1},
        {"y": Y + 1},
        "target: got 10, expected 0 <= target < 10",
    ),
    "a negative target": ({"y": Y - 3}, {"y": Y - 3}, "target: got -3, expected 0 <= target < 10"),
    "a target outside every shard on one rank": (
        {},
        {"y": Y + 1},
        "target: got .* on rank .* expected the same on every rank",
    ),
    "other targets": ({}, {"y": Y.flip(0)}, "target: got .* expected the same on every rank"),
    "a token that one rank ignores": (
        {},
        {"y": Y.where(Y != 0, -100)},
        "target: got .* expected the same on every rank",
    ),
    "shards": ({"w": W[:4]}, {"w": W[4:]}, "rows of linear_weight, or shards: got"),
    "shards other than the rows of w": (
        {"w": W[:4], "shards": (5, 5)},
        {"w": W[4:], "shards": (4, 6)},
        r"shards: got \[., .\], expected the rows of linear_weight of 2 ranks",
    ),
    **{
        name: ({name: first}, {name: second}, f"{name}.*: got")
        for name, (first, second) in OPTIONS.items()
    },
    "no weight": ({"weight": ONES}, {}, "weight.*: got"),
    "temperatures of tokens": ({}, {"temperature": ONES[:8]}, "temperature.*: got"),
    "unknown outputs": ({"outputs": ()}, {"outputs": ["perplexity"]}, "outputs: got"),
    "other probabilities": (SOFT, SOFT | {"target_probs": 2 * torch.ones(8, 1)}, "target_probs: "),
    "a bad probability": (SOFT | BAD_PROB, SOFT | BAD_PROB, "target_probs: got -1.0"),
    "a bad index": (SOFT | BAD_INDEX, SOFT | BAD_INDEX, "target_indices: got 10"),
    "more classes than float32 has numbers for": (
        {"h": H[:, :1], "w": torch.zeros(2**23 + 1, 1), "outputs": ("argmax",)},
        {"h": H[:, :1], "w": torch.zeros(2**23 + 1, 1), "outputs": ("argmax",)},
        "outputs: got 'argmax' with 16777218 classes, expected at most 2.24",
    ),
    "a kept class that is none": (
        {"outputs": (), "kept_classes": Y[:, None].clamp(min=0) + 99},
        {"outputs": (), "kept_classes": Y[:, None].clamp(min=0) + 99},
        r"kept_classes: got 99 at token \d, expected -1 or 0 <= class < 10",
    ),
    "class indices beside soft targets": ({}, SOFT, "target.*: got .*expected the same on every"),
    "a weight that is cast on one rank": (
        {"h": H.bfloat16(), "w": W[:5].bfloat16()},
        {"h": H.bfloat16()},
        "linear_weight cast to 16 bits: got",
    ),
    "one rank's own mistake": ({}, {"y": Y[:3]}, r"target: got shape \(3,\)"),
    "one rank's empty shard": ({}, {"w": W[:0]}, r"linear_weight: got shape \(0, 8\)"),
}


@pytest.mark.parametrize(("first", "second", "message"), WRONG.values(), ids=WRONG)
def test_ranks_that_differ_all_raise(
    first: dict[str, Any], second: dict[str, Any], message: str, ranks: Ranks
) -> None:
    for outcomes in (
        ranks.outcomes(2, call, first, second),
        ranks.outcomes(2, call, second, first),
    ):
        for failed, text in outcomes:
            assert failed
            assert re.search(message, text), text
        good = ranks.run(2, call, {}, {})
        assert torch.equal(good[0], good[1])


def share_of(kind: str, sequence_parallel: bool | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and gradients of rows of 4 and 6 classes; of one process if None."""
    torch.manual_seed(0)
    positions = (2,) if kind == "positions" else ()
    h, w = torch.randn(8, 8), torch.randn(10, *positions, 8)
    y, more = torch.randint(10, (8, *positions)), dict[str, Any](weight=torch.rand(10))
    if kind == "a float32 weight":
        h, more = h.bfloat16(), {}
    if sequence_parallel is not None:
        rank = dist.get_rank()
        w = w.split((4, 6))[rank]
        h = h.split(4)[rank] if sequence_parallel else h
        more |= {"group": group(2), "shards": (4, 6), "sequence_parallel": sequence_parallel}
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    loss: Tensor = cutefce.linear_cross_entropy(h, w, y, **more)
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), h.grad, w.grad


@each_value(kind=["a float32 weight", "positions"], sequence_parallel=[False, True])
def test_shares_of_other_forms_equal_one_process(
    kind: str, sequence_parallel: bool, ranks: Ranks
) -> None:
    first, second = ranks.run(2, share_of, kind, sequence_parallel)
    loss, dx, dw = share_of(kind, None)
    torch.testing.assert_close((first[0], second[0]), (loss, loss))
    torch.testing.assert_close(torch.cat([first[2], second[2]]), dw)
    shares = torch.cat([first[1], second[1]]) if sequence_parallel else first[1]
    torch.testing.assert_close(shares, dx)


def served_by(names: tuple[str, str]) -> None:
    """Call as if this rank's part were served by its one of `names`."""
    backend = dispatch.Backend(names[dist.get_rank()], "as if")
    with mock.patch.object(shard, "backend_of", lambda *_: backend):
        call({}, {})


def test_ranks_that_differ_in_primitives_all_raise(ranks: Ranks) -> None:
    """As where one GPU has no memory to spare to verify the kernels."""
    for failed, text in ranks.outcomes(2, served_by, ("cute", "torch")):
        assert failed
        assert re.search("primitives: got .* expected the same on every rank", text), text


def misuse(given: dict[str, Any]) -> str:
    """Return what a call with `given` raises; (x, dim of the mesh, placement) is a DTensor."""
    placed: dict[str, Any] = {"h": H, "w": (W, "tp", Shard(0)), "y": Y} | given
    if "group" in placed:
        placed["group"] = group(4)
    for name, value in placed.items():
        if isinstance(value, tuple):
            x, dim, placement = value
            placed[name] = DTensor.from_local(x, mesh()[dim], [placement])
    tensors = [placed.pop(name) for name in ("h", "w", "y")]
    with pytest.raises((TypeError, ValueError)) as caught:
        cutefce.linear_cross_entropy(*tensors, **placed)
    return f"{caught.type.__name__}: {caught.value}"


PLACED = {"h": (H, "tp", Replicate())}

MISUSES: dict[str, tuple[dict[str, Any], str]] = {
    "replicated w": (
        {"w": (W, "tp", Replicate())},
        r"TypeError: linear_weight: got .*Replicate.*Shard\(0\)",
    ),
    "w by columns": (
        {"w": (W, "tp", Shard(1))},
        r"TypeError: linear_weight: got .*dim=1.*full_tensor",
    ),
    "partial w": ({"w": (W, "tp", Partial())}, "TypeError: linear_weight: got .*Partial"),
    "h by columns": ({"h": (H, "tp", Shard(1))}, "TypeError: input: got .*dim=1.*of tokens"),
    "partial h": ({"h": (H, "tp", Partial())}, "TypeError: input: got .*Partial"),
    "replicated h as a part": (
        {"h": (H, "tp", Replicate()), "sequence_parallel": True},
        "TypeError: input: .*without sequence_parallel",
    ),
    "sharded y": (
        {**PLACED, "y": (Y, "tp", Shard(0))},
        "TypeError: target: got .*target.full_tensor",
    ),
    "h on another mesh": ({"h": (H, "dp", Replicate())}, "ValueError: input: got DeviceMesh"),
    "plain h": ({}, r"TypeError: linear_weight: got .*plain input; if FSDP2.*group="),
    "a sharded denominator": (
        {**PLACED, "denominator": (Y, "tp", Shard(0))},
        "TypeError: denominator: got .*denominator.full_tensor",
    ),
    "probabilities beside a plain w": (
        {"w": W, "y": (torch.rand(8, 10), "tp", Replicate())},
        "TypeError: target: got a DTensor",
    ),
    "a group that is not the mesh's": ({"group": 4}, "ValueError: group: got"),
    "h alone": ({"w": W, "h": (H, "tp", Shard(0))}, "TypeError: input: got a DTensor"),
    "a part of the tokens, without a group": (
        {"w": W, "sequence_parallel": True},
        "ValueError: sequence_parallel: got True without a group",
    ),
}


@pytest.mark.parametrize(("given", "message"), MISUSES.values(), ids=MISUSES)
def test_wrong_placements_raise_at_once(given: dict[str, Any], message: str, ranks: Ranks) -> None:
    for text in ranks.run(4, misuse, given):
        assert re.match(message, text), text


def placed_share(
    shape: tuple[int, ...], h_placement: Placement, vocab: int, reduction: str
) -> tuple[Tensor, ...]:
    """Return loss and whole gradients of distributed tensors, and those of one process."""
    tp = mesh()["tp"]
    torch.manual_seed(0)
    h, w = torch.randn(*shape, 8, dtype=torch.float64), torch.randn(vocab, 8, dtype=torch.float64)
    y = torch.randint(vocab, shape)
    y.flatten()[::5] = -100
    placed_h = distribute_tensor(h, tp, [h_placement]).requires_grad_()
    head = cutefce.LinearCrossEntropyLoss(8, vocab, reduction=reduction, dtype=torch.float64)
    head.linear.weight = nn.Parameter(distribute_tensor(w, tp, [Shard(0)]))
    loss = head(placed_h, y)
    upstream = torch.randn(loss.shape, dtype=torch.float64)
    dx, dw = torch.autograd.grad(loss, (placed_h, head.linear.weight), upstream)
    assert isinstance(dx, DTensor) and dx.placements == (h_placement,)
    assert isinstance(dw, DTensor) and dw.placements == (Shard(0),)
    h.requires_grad_()
    w.requires_grad_()
    rows = F.linear(h, w).flatten(0, -2)
    want = F.cross_entropy(rows, y.flatten(), reduction=reduction)
    want = want.view_as(loss)
    gradients = torch.autograd.grad(want, (h, w), upstream)
    return loss.detach(), dx.full_tensor(), dw.full_tensor(), want.detach(), *gradients


Placed = tuple[tuple[int, ...], Placement, int, str]
PLACEMENTS: list[Placed] = [
    ((2, 4, 3), Shard(1), 31, "mean"),
    ((12,), Replicate(), 30, "mean"),
    ((3, 4), Replicate(), 31, "none"),
    ((12,), Shard(0), 31, "sum"),
    ((3, 4), Shard(1), 30, "none"),
    ((2, 3, 4), Shard(2), 31, "none"),
]
"""Shape and placement of the tokens, classes and reduction."""


@pytest.mark.parametrize("given", PLACEMENTS, ids=str)
def test_placements_select_the_form(given: Placed, ranks: Ranks) -> None:
    for loss, dx, dw, *want in ranks.run(4, placed_share, *given):
        torch.testing.assert_close([loss, dx, dw], want)


def uneven(h_rows: int, vocab: int, given: dict[str, Any]) -> None:
    tp = mesh()["tp"]
    h = distribute_tensor(torch.randn(h_rows, 8), tp, [Shard(0)])
    w = distribute_tensor(torch.randn(vocab, 8), tp, [Shard(0)])
    cutefce.linear_cross_entropy(h, w, torch.zeros(h_rows).long(), **given)


@pytest.mark.parametrize(
    ("h_rows", "vocab", "given", "message"),
    [
        (5, 8, {}, r"target: got shape \(5,\), expected .* of which 2 ranks hold a part each"),
        (4, 1, {}, r"shards: got \[1\], expected the rows .*2 ranks|linear_weight: got shape \(0,"),
        (4, 8, {"shards": (5, 3)}, r"shards: got \[5, 3\], expected the rows .* and 4 for rank"),
    ],
)
def test_shards_that_cannot_be_shared(
    h_rows: int, vocab: int, given: dict[str, Any], message: str, ranks: Ranks
) -> None:
    for failed, text in ranks.outcomes(4, uneven, h_rows, vocab, given):
        assert failed and re.search(message, text), text


def microbatches(sequence_parallel: bool, workspace: str) -> tuple[Tensor, ...]:
    """Return summed loss and gradients of 2 replicas x 2 microbatches, and of one big batch."""
    dp, tp = mesh()["dp"], mesh()["tp"]
    case = random_case(64, 16, 333, dtype=torch.float64, ignored=0.4)
    case.y[:16] = -100  # a microbatch without any target
    w = case.w.clone().split((100, 233))[tp.get_local_rank()].requires_grad_()
    hs, ys = (x.view(2, 2, 16, *x.shape[1:])[dp.get_local_rank()] for x in (case.h, case.y))
    count = (ys != -100).sum()
    dist.all_reduce(count, group=dp.get_group())
    total, dxs = torch.zeros((), dtype=torch.float64), []
    for h, y in zip(hs, ys, strict=True):
        part = h.chunk(2)[tp.get_local_rank()] if sequence_parallel else h
        part = part.clone().requires_grad_()
        sharing: Any = {"group": tp.get_group(), "shards": (100, 233)}
        sharing["sequence_parallel"] = sequence_parallel
        loss = cutefce.linear_cross_entropy(
            part, w, y, denominator=count, workspace=workspace, **sharing
        )
        loss.backward()
        total += loss.detach()
        assert part.grad is not None
        dxs.append(part.grad)
    assert w.grad is not None
    for x in (total, w.grad):
        dist.all_reduce(x, group=dp.get_group())
    want_h, want_w = case.h.requires_grad_(), case.w.requires_grad_()
    want = F.cross_entropy(F.linear(want_h, want_w), case.y)
    want.backward()
    assert want_h.grad is not None and want_w.grad is not None
    want_dx = want_h.grad.view(2, 2, 16, 16)[dp.get_local_rank()]
    if sequence_parallel:
        want_dx = want_dx.chunk(2, 1)[tp.get_local_rank()]
    want_dw = want_w.grad.split((100, 233))[tp.get_local_rank()]
    return total, torch.stack(dxs), w.grad, want.detach(), want_dx, want_dw


@each_value(workspace=["max", "min"], sequence_parallel=[False, True])
def test_microbatches_of_replicas_equal_one_batch(
    workspace: str, sequence_parallel: bool, ranks: Ranks
) -> None:
    for results in ranks.run(4, microbatches, sequence_parallel, workspace):
        torch.testing.assert_close(results[:3], results[3:])


COPIED_BUDGETS = range(560_000, 1_100_000, 5_600)
"""From the smallest plan, past several chunks and one, to windows that keep everything."""


def copied_on_one_rank(strided: str) -> tuple[list[tuple[str, int]], list[float]]:
    """Return strategies and chunks of budgets, and losses, of which the last is torch's.

    The shards are uneven, and an operand of one rank is copied.
    """
    rank, shards = dist.get_rank(), (200, 133)
    torch.manual_seed(0)
    h, w, y = torch.randn(1100, 128), torch.randn(333, 128), torch.randint(333, (1100,))
    hidden = h[:, ::2] if rank == 0 or strided == "weight" else h[:, ::2].contiguous()
    own = w[:, ::2].split(shards)[rank]
    own = own if strided == "weight" else own.contiguous()
    leaves = hidden.detach().requires_grad_(), own.detach().requires_grad_()
    sharing: Any = {"group": group(2), "shards": shards}
    plans = [cutefce.plan(*leaves, workspace=each, **sharing) for each in COPIED_BUDGETS]
    losses = []
    for budget in ("min", 771_584, None):
        loss = cutefce.linear_cross_entropy(*leaves, y, workspace=budget, **sharing)
        loss.backward()
        losses.append(loss.item())
    losses.append(F.cross_entropy(h[:, ::2] @ w[:, ::2].T, y).item())
    return [(plan.strategy, plan.chunk) for plan in plans], losses


@pytest.mark.parametrize("strided", rest_slow(["hidden", "weight"]))
def test_ranks_that_copy_different_operands_plan_alike(strided: str, ranks: Ranks) -> None:
    (first, losses), (second, others) = ranks.run(2, copied_on_one_rank, strided)
    assert first == second and len(set(first)) > 1
    assert losses == others
    assert losses[:-1] == pytest.approx([losses[-1]] * 3, rel=1e-5)


def collectives(sequence_parallel: bool, grad: bool) -> list[tuple[str, list[int]]]:
    """Return the collectives of a step in their order, and the shapes of what they were given."""
    h = (H[:4] if sequence_parallel else H).clone().requires_grad_(grad)
    w, y = W.split(5)[dist.get_rank()].clone().requires_grad_(grad), Y
    with torch.profiler.profile(record_shapes=True) as profile:
        loss = cutefce.linear_cross_entropy(
            h, w, y, group=group(2), sequence_parallel=sequence_parallel, reduction="none"
        )
        if grad:
            loss.sum().backward()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [(event.name.removeprefix("_c10d_functional::"), event) for event in events]
    return [(name, event.input_shapes[0]) for name, event in names if name in COLLECTIVES]


COLLECTIVES = "all_gather_into_tensor", "all_reduce_", "reduce_scatter_tensor"


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_exchanged(sequence_parallel: bool, grad: bool, ranks: Ranks) -> None:
    gather, reduce, scatter = COLLECTIVES
    forward = [(reduce, [2, 8]), (gather, [2, 8])]
    backward = [(scatter, [8, 8]), (gather, [4, 8])]
    if sequence_parallel:
        forward.insert(0, (gather, [4, 8]))
        backward = [(gather, [4, 8]), (scatter, [8, 8])]
    for seen in ranks.run(2, collectives, sequence_parallel, grad):
        assert seen == (forward + backward if grad else forward)


class Model(nn.Module):
    """A body and the head that the recipe of the README makes a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        self.head = cutefce.LinearCrossEntropyLoss(8, 20, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor, denominator: Tensor) -> Tensor:
        """Return the loss of x (N, 8) against y (N,)."""
        loss: Tensor = self.head(self.body(x), y, denominator)
        return loss


def gathered_head() -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Return how often the head's weight is gathered, and gradients with and without FSDP2."""
    torch.manual_seed(0)
    model, whole = Model(), Model()
    whole.load_state_dict(model.state_dict())
    fully_shard(model.head, mesh=mesh()["tp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh()["tp"])
    rank, x = mesh()["tp"].get_local_rank(), torch.randn(2, 6, 8, dtype=torch.float64)
    y = torch.randint(20, (2, 6))
    y[0, :4] = -100
    count = (y != -100).sum()
    gathers: list[int] = []
    with CommDebugMode() as comm:
        # the gradients are averaged over the ranks
        model(x[rank], y[rank], count / 2).backward()
    counts = comm.get_comm_counts()
    gathers = [n for op, n in counts.items() if "allgather" in str(op) or "all_gather" in str(op)]
    whole(x.flatten(0, 1), y.flatten(), count).backward()
    got = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]
    want = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    return sum(gathers), got, want


def test_fsdp_gathers_the_head_once_a_step(ranks: Ranks) -> None:
    for gathers, got, want in ranks.run(4, gathered_head):
        assert gathers == 2, "the head's weight and the body's, each once"
        torch.testing.assert_close(got, want)


def sharded_head(own_unit: bool) -> tuple[list[str], Tensor, Tensor]:
    """Return what calls with a weight that FSDP2 has sharded raise; a served loss, and torch's.

    The unit is the head, or with `own_unit` its linear layer.
    """
    torch.manual_seed(0)
    tp, head = mesh()["tp"], cutefce.LinearCrossEntropyLoss(8, 20)
    fully_shard(head.linear if own_unit else head, mesh=tp)
    x, y = torch.randn(6, 8), torch.arange(6)
    weight = head.linear.weight
    texts = []
    for given in (weight, weight.detach()):
        with pytest.raises(TypeError) as caught:
            cutefce.linear_cross_entropy(x, given, y)
        texts.append(str(caught.value))
    if own_unit:  # otherwise the weight is whole in the forward of its unit
        with pytest.raises(TypeError, match=r"linear: got hooks, .*fully_shard"):
            head(x, y)
    assert isinstance(weight, DTensor)
    want = F.cross_entropy(F.linear(x, weight.full_tensor()), y)
    if own_unit:
        loss = cutefce.linear_cross_entropy(x, weight, y, group=tp.get_group())
    else:
        loss = head(x, y)
    return texts, loss.detach(), want.detach()


@pytest.mark.parametrize("own_unit", [False, True])
def test_weight_that_fsdp_has_sharded_is_refused_unless_a_group_is_named(
    own_unit: bool, ranks: Ranks
) -> None:
    for texts, loss, want in ranks.run(4, sharded_head, own_unit):
        for text in texts:
            assert re.match("linear_weight: got a DTensor .* FSDP2 .* forward of its unit", text)
        torch.testing.assert_close(loss, want)


def dying(when: str) -> None:
    """Die on rank 1; on rank 0, go on."""
    h, w = H.clone().requires_grad_(), W.split(5)[dist.get_rank()].clone().requires_grad_()
    for step in range(3):
        if dist.get_rank() == 1 and when == "forward" and step:
            os._exit(1)
        loss = cutefce.linear_cross_entropy(h, w, Y, group=group(2))
        if dist.get_rank() == 1 and when == "backward" and step:
            os._exit(1)
        loss.backward()


@pytest.mark.parametrize("when", rest_slow(["forward", "backward"]))
def test_a_rank_that_dies_ends_the_others(when: str) -> None:
    timeout_s = 3.0
    with started(2, timeout_s) as two:
        for pipe in two.pipes:
            pipe.send((dying, (when,)))
        with pytest.raises(EOFError):
            two.pipes[1].recv()
        begin = time.monotonic()
        failed, text = two.pipes[0].recv()
    assert failed and "RuntimeError" in text
    assert time.monotonic() - begin < timeout_s + 2


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_opcheck(sequence_parallel: bool, ranks: Ranks) -> None:
    ranks.run(2, checked, sequence_parallel)


def checked(sequence_parallel: bool) -> None:
    h = (H[:4] if sequence_parallel else H).clone().requires_grad_()
    w = W.split((4, 6))[dist.get_rank()].clone().requires_grad_()
    options: dict[str, Any] = {"group": group(2).group_name, "shards": [4, 6]}
    options["sequence_parallel"] = sequence_parallel
    for overload in ("default", "preset"):
        if overload == "preset":
            options["workspace"] = "min"
        op = getattr(torch.ops.cutefce.loss, overload)
        torch.library.opcheck(op, (h, w, Y), options)


def peak(
    tokens: int,
    vocab: int,
    sequence_parallel: bool,
    workspace: str,
    dtype: torch.dtype,
    reduction: str,
) -> tuple[int, int]:
    """Return the predicted and the measured workspace of a step."""
    case = random_case(tokens, 256, vocab, dtype=dtype, seed=dist.get_rank())
    h = (case.h[: tokens // 2] if sequence_parallel else case.h).requires_grad_()
    w, y = case.w[: vocab // 2].requires_grad_(), random_case(tokens, 8, vocab, ignored=0).y
    options: dict[str, Any] = {"reduction": reduction, "workspace": workspace}
    options["sequence_parallel"] = sequence_parallel

    def step() -> None:
        loss = cutefce.linear_cross_entropy(h, w, y, group=group(2), **options)
        torch.autograd.grad(loss.sum(), (h, w))

    with served_with(PortableTiles(1024, 1024, 1024, 512)):
        step()
        plan = cutefce.plan(h, w, group=group(2), **options)
        gradient_bytes = sum(x.numel() * x.element_size() for x in (h, w))
        # of large exchanges, gloo's threads may free their copies late
        repeats = 6 if tokens > vocab else 1
        measured = min(peak_bytes(step, "cpu") for _ in range(repeats)) - gradient_bytes
    return plan.workspace_bytes, measured


@contextmanager
def served_with(tiles: PortableTiles) -> Iterator[None]:
    """Let a step have larger tiles, and so fewer operators, whose memory takes long to follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults.PORTABLE_TILES, "cpu", tiles)
        process_cache.reset()
        yield
    process_cache.reset()


@each_value(
    sizes={"classes": (512, 8002, 0.1), "tokens": (2050, 514, 0.2)},
    sequence_parallel=[True, False],
    workspace=["max", "min"],
    dtype=[torch.bfloat16, torch.float32],
    reduction=["none", "mean"],
)
def test_peak_is_predicted(
    sizes: tuple[int, int, float],
    sequence_parallel: bool,
    workspace: str,
    dtype: torch.dtype,
    reduction: str,
    ranks: Ranks,
) -> None:
    """Where classes take most of the memory, and where the exchange of dX does."""
    tokens, vocab, beyond = sizes
    arguments = tokens, vocab, sequence_parallel, workspace, dtype, reduction
    for expected, measured in ranks.run(2, peak, *arguments):
        assert -0.1 * measured <= expected - measured <= beyond * measured


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", ["max", "min", 2 << 20])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_rank_on_a_gpu(
    dtype: torch.dtype, sequence_parallel: bool, workspace: int | str, tmp_path: Any
) -> None:
    """The steps between the kernels, on the smallest group that there is."""
    store = f"file://{tmp_path}/store"
    dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        case = random_case(300, 64, 3000, dtype=dtype, device="cuda")
        sharing: Any = {"group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
        assert_as_accurate(ours(case, workspace=workspace, **sharing), case)
    finally:
        dist.destroy_process_group()
