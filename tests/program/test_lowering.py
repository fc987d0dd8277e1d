"""Programs of random calls and layouts: losses and gradients are those of autograd."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.ops.program.layout import Layout, most_aliased
from cutefce.ops.program.lower import lower
from cutefce.ops.program.place import peak, token_bytes
from cutefce.ops.program.problem import LossProblem, Upstream
from cutefce.ops.program.steps import Home, Kind, Program
from tests.program.interpreter import (
    IGNORED,
    LOW_BITS,
    Call,
    Inputs,
    SmallBlocks,
    counted,
    together,
)
from tests.support.sound_programs import check
from tests.support.tiers import rest_slow

TOKENS, HIDDEN, VOCAB = 40, 24, 150
WHOLE = LossProblem(TOKENS, HIDDEN, VOCAB, item=8, sums=8)
TRAINED = [x for x in itertools.product((True, False), repeat=3) if any(x)]
LAYOUTS = {
    "nothing kept": Layout(TOKENS, 32),
    "some kept": Layout(TOKENS, 32, 50),
    "everything kept": Layout(TOKENS, 32, 150),
    "most in dW": Layout(TOKENS, 8, 0, 70),
    "in dW and kept": Layout(TOKENS, 16, 40, 64),
    "in dW, the rest kept": Layout(TOKENS, 16, 86, 64),
    "two chunks": Layout(20, VOCAB, in_forward=True),
    "one chunk": Layout(TOKENS, VOCAB, in_forward=True),
    "chunks of 7": Layout(7, VOCAB, in_forward=True),
    "windows in chunks": Layout(14, 40, in_forward=True),
}
CALLS = {
    "plain": WHOLE,
    "a gradient of each token": dataclasses.replace(WHOLE, upstream=Upstream.ROWS),
    "a gradient that is known": dataclasses.replace(WHOLE, upstream=Upstream.KNOWN),
    "weights of tokens": dataclasses.replace(WHOLE, scales_rows=True),
    "label smoothing": dataclasses.replace(WHOLE, every_class=True),
    "two classes of each token": dataclasses.replace(WHOLE, soft=True),
    "two classes, a gradient of each": dataclasses.replace(
        WHOLE, soft=True, upstream=Upstream.ROWS
    ),
    "smoothed, a gradient of each": dataclasses.replace(
        WHOLE, every_class=True, upstream=Upstream.ROWS
    ),
}
MEMORIES: dict[str, dict[str, Any]] = {
    "in one piece": {},
    "selected rows": {"selects": True},
    "in pieces": {"item": 4},
    "in pieces, selected rows": {"item": 4, "selects": True},
    "into a buffer": {"into": 8},
    "in pieces, into a buffer": {"item": 4, "into": 8, "selects": True},
    "a wider dW": {"item": 4, "grad_weight_item": 8},
}


def can_run(p: LossProblem, x: Layout) -> bool:
    """Whether a call can have this layout."""
    if x.in_forward and (
        not p.can_chunk or (x.window < p.vocab and (p.grad_weight or p.grad_bias))
    ):
        return False
    return x.aliased <= most_aliased(p, min(x.window, 16), SmallBlocks().block)


def inputs_of(p: LossProblem, shards: Sequence[int] = (VOCAB,), seed: int = 0) -> list[Inputs]:
    """Return random inputs for each rank; the first token and a fourth of all are ignored."""
    draw, dtype = torch.Generator().manual_seed(seed), {4: torch.float32, 8: torch.float64}[p.item]
    total = sum(shards)
    h, w = (torch.randn(n, p.hidden, generator=draw).to(dtype) for n in (p.tokens, total))
    bias = torch.randn(total, generator=draw).to(dtype)
    y = torch.randint(total, (p.tokens,), generator=draw)
    y[torch.rand(p.tokens, generator=draw) < 0.25] = y[0] = IGNORED
    weight = torch.ones(p.tokens, dtype=torch.float64)
    if p.scales_rows:
        weight = torch.rand(p.tokens, generator=draw).double()
    rows = () if p.upstream is not Upstream.ROWS else (p.tokens,)
    upstream = torch.randn(rows, generator=draw).double()
    smoothing, found, first = 0.1 * p.every_class, [], 0
    for size in shards:
        own = slice(first, first + size)
        into = torch.ones(size, p.hidden, dtype=torch.float64) if p.into else None
        given: Any = h, w[own], bias[own], y, weight, upstream, smoothing, first, total, into
        if p.soft:
            given += (y.clamp(min=0) + 1 + torch.arange(p.tokens) % (total - 1)) % total, 0.3
        found.append(Inputs(*given))
        first += size
    return found


def expected(p: LossProblem, ranks: Sequence[Inputs]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss of all ranks, and the gradients of h, w and the bias."""
    x = ranks[0]
    given = x.h, torch.cat([r.w for r in ranks]), torch.cat([r.bias for r in ranks])
    h, w, bias = (t.double().requires_grad_() for t in given)
    logits = h @ w.T + bias
    counts = x.target != IGNORED
    at = x.target.clamp(min=0)[:, None]
    losses = logits.logsumexp(1) - (1 - x.smoothing) * logits.gather(1, at)[:, 0]
    losses = torch.where(counts, losses - x.smoothing * logits.mean(1), 0) * x.row_weight
    if x.other is not None:
        more = logits.gather(1, x.other[:, None]) - logits.gather(1, at)
        losses = losses - torch.where(counts, x.share * more[:, 0], 0) * x.row_weight
    loss = losses if p.upstream is Upstream.ROWS else losses.sum() / counted(x.target)
    return loss.detach(), torch.autograd.grad(loss, (h, w, bias), x.upstream)


def compare(programs: Sequence[Program], ranks: Sequence[Inputs]) -> None:
    """Run a call and two backwards on each rank; compare all with autograd."""
    p = programs[0].problem
    for q in programs:
        check(q)
    calls = [Call(q, x) for q, x in zip(programs, ranks, strict=True)]
    loss, gradients = expected(p, ranks)
    near: Any = {"rtol": 1e-9, "atol": 1e-10} if p.item == 8 else {"rtol": 1e-4, "atol": 1e-5}
    for got in together([call.forward() for call in calls]):
        torch.testing.assert_close(got, loss, **near)
    for number in range(1, 2 + (p.upstream is not Upstream.KNOWN or not p.into)):
        is_spent = any(call.is_spent for call in calls)
        for call in calls:  # ranks agree on whether the forward runs again
            call.is_spent = is_spent
        results = together([call.backward() for call in calls])
        if len(calls) > 1 and Home.DX in results[0]:  # each rank has a part of dX
            whole = sum(result[Home.DX].view(torch.float64) for result in results)
            assert isinstance(whole, Tensor)
            results[0][Home.DX] = whole.view(torch.uint8)
            for result in results[1:]:
                del result[Home.DX]
        for call, result in zip(calls, results, strict=True):
            rows = slice(call.x.first, call.x.first + call.p.vocab)
            wanted = gradients[0], gradients[1][rows], gradients[2][rows]
            for home, want in zip((Home.DX, Home.DW, Home.DBIAS), wanted, strict=True):
                if home in result:
                    item = p.dw_item if home is Home.DW else p.item
                    dtype = {4: torch.float32, 8: torch.float64}[item]
                    got = result[home].view(dtype).view(want.shape).double()
                    torch.testing.assert_close(got, want, **near)
            if call.x.into is not None and p.grad_weight:
                torch.testing.assert_close(call.x.into, 1 + number * wanted[1], **near)
    for call in calls:
        gradients = sum(call.p.gradient_bytes().values())
        assert call.held + token_bytes(call.p) == peak(call.q) + gradients


def cases() -> Iterator[tuple[str, LossProblem, Layout]]:
    for (call, p), (memory, more), (name, x) in itertools.product(
        CALLS.items(), MEMORIES.items(), LAYOUTS.items()
    ):
        for trained in TRAINED:
            names = "grad_hidden", "grad_weight", "grad_bias"
            own = dataclasses.replace(p, **more, **dict(zip(names, trained, strict=True)))
            low = LOW_BITS if own.keeps_sums else 0
            layout = dataclasses.replace(x, low_bits=low)
            if can_run(own, layout) and (own.grad_weight or not more.get("into")):
                yield f"{call}, {memory}, {name}, {trained}", own, layout


PARTS = 23
"""The first of which has calls of each kind."""


@pytest.mark.parametrize("part", rest_slow(range(PARTS)))
def test_gradients_are_those_of_autograd(part: int) -> None:
    for name, p, x in itertools.islice(cases(), part, None, PARTS):
        print(name)
        compare([lower(p, x, SmallBlocks())], inputs_of(p))


@pytest.mark.parametrize("name", ["in dW and kept", "two chunks", "windows in chunks"])
@pytest.mark.parametrize("call", rest_slow(["plain", "label smoothing"]))
def test_every_step_is_needed(call: str, name: str) -> None:
    """What a step leaves out, the comparison finds."""
    x = LAYOUTS[name]
    trains = not x.in_forward or x.window == VOCAB
    p = dataclasses.replace(
        CALLS[call], selects=True, grad_weight=trains, grad_bias=trains, grad_hidden=True
    )
    count, inputs = len([*lower(p, x, SmallBlocks()).steps()]), inputs_of(p)
    wanted, gradients = expected(p, inputs)
    for number in range(count):
        program = lower(p, x, SmallBlocks())
        part = program.forward if number < len(program.forward) else program.backward
        if part[number - len(program.forward) * (part is program.backward)].kind is Kind.CLEAR:
            continue  # of what this interpreter does not read
        step = part.pop(number - len(program.forward) * (part is program.backward))
        with pytest.raises((AssertionError, RuntimeError, IndexError, KeyError, ValueError)):
            run = Call(program, inputs[0])
            (loss,), (result,) = together([run.forward()]), together([run.backward()])
            torch.testing.assert_close(loss, wanted)
            homes = [home for home in (Home.DX, Home.DW, Home.DBIAS) if home in result]
            assert homes == [Home.DX, Home.DW, Home.DBIAS][: 3 if trains else 1], step
            for home, want in zip((Home.DX, Home.DW, Home.DBIAS), gradients, strict=True):
                if home in result:
                    got = result[home].view(torch.float64).view(want.shape)
                    torch.testing.assert_close(got, want)


SHARDS = {"narrow and wide": (60, 90), "wide and narrow": (118, 32)}
OF_RANKS = {
    "some kept, in dW": ("some kept", "most in dW"),
    "everything, nothing": ("everything kept", "nothing kept"),
    "chunks": ("two chunks", "two chunks"),
}


@pytest.mark.parametrize("layouts", OF_RANKS.values(), ids=OF_RANKS)
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_ranks_share_a_call(shards: tuple[int, int], layouts: tuple[str, str]) -> None:
    """Each with a layout of its own; what they exchange is the same."""
    for call, p in CALLS.items():
        if p.soft:  # what ranks exchange of them belongs to REDUCE
            continue
        owns = [dataclasses.replace(p, vocab=size, ranks=2, selects=True) for size in shards]
        chosen = [LAYOUTS[name] for name in layouts]
        fitting = []
        for own, x in zip(owns, chosen, strict=True):
            window = min(x.window, own.vocab) if x.window < VOCAB else own.vocab
            aliased = min(x.aliased, most_aliased(own, 16, SmallBlocks().block))
            kept = min(x.kept, own.vocab)
            own_layout = Layout(x.chunk, window, kept, aliased, in_forward=x.in_forward)
            fitting.append(own_layout)
        if all(can_run(*pair) for pair in zip(owns, fitting, strict=True)):
            programs = [lower(*pair, SmallBlocks()) for pair in zip(owns, fitting, strict=True)]
            compare(programs, inputs_of(owns[0], shards))
        else:
            assert "chunks" in layouts[0] and p.upstream is Upstream.ROWS, call
