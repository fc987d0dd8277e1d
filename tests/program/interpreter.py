"""Runs programs in float64 on real memory, which tells nothing but what steps have written there.

Memory is NaN where no buffer lives.  Kept sums are a float32 in the gradient's memory and the rest
of the sum beside it.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.program.cost_model import CostModel
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.problem import LossProblem, Upstream
from cutefce.ops.program.steps import GRADIENTS, Home, Kind, Program, Step

IGNORED = -100
SLACK = 5.0
"""Nats of a row's sum above its target from which its reference moves: about half of them do."""
REFERENCE, OTHERS, TOTAL, LOSS = range(4)
SCALE, TARGET, EVERY, RELATIVE_TO = range(4)
LOW_BITS = 32
DTYPES = {4: torch.float32, 8: torch.float64}

Exchange = Generator[tuple[Kind, Tensor], Tensor, Any]


class SmallBlocks(CostModel):
    """Windows of any columns, one sum a row, and no scratch."""

    def __init__(self) -> None:
        pass

    @property
    def block(self) -> int:
        return 1

    def partial_sums(self, p: LossProblem, rows: int, columns: int) -> int:
        return 1

    def few_low_bits(self, p: LossProblem) -> int:
        return LOW_BITS

    def listed_targets(self, p: LossProblem, in_chunks: bool) -> int:
        return 4

    def scratch(self, p: LossProblem, x: Layout, step: Step) -> int:
        return 0


@dataclass
class Inputs:
    """What a call is given, on one rank: its classes are those from `first` on."""

    h: Tensor
    w: Tensor
    bias: Tensor
    target: Tensor
    """Classes of all ranks, or IGNORED."""
    row_weight: Tensor
    upstream: Tensor
    smoothing: float = 0.0
    first: int = 0
    classes: int = 0
    """Of all ranks."""
    into: Tensor | None = None
    other: Tensor | None = None
    """Another class of each token, with a share of its target's probability."""
    share: float = 0.0


class Call:
    """One call of a program: its memory, and what it has found."""

    def __init__(self, q: Program, x: Inputs) -> None:
        self.q, self.x, self.p = q, x, q.problem
        self.memory: dict[Home, Tensor] = {Home.SAVED: unknown(q.arenas[Home.SAVED])}
        self.outside: dict[str, Tensor] = {}
        stats = q.buffers["stats"]
        self.memory[Home.STATS] = unknown(stats.size)
        if x.into is not None:
            self.memory[Home.INTO] = x.into.view(-1).view(torch.uint8)
        self.loss, self.is_spent, self.held = x.h.new_zeros(()), False, 0
        self.far = torch.zeros(self.p.tokens, dtype=torch.bool)
        known = self.p.upstream is Upstream.KNOWN
        self.upstream = x.upstream if known else torch.ones((), dtype=torch.float64)
        self.count, self.relative = self.p.tokens, False

    def forward(self) -> Exchange:
        yield from self.run(self.q.forward, Home.FORWARD, 0)
        return self.loss

    def backward(self) -> Exchange:
        if self.is_spent:
            for home in GRADIENTS:
                self.memory.pop(home, None)
            yield from self.run(self.q.forward, Home.FORWARD, 0)
        before, self.upstream = self.upstream, self.x.upstream
        self.is_spent = self.q.is_spent
        yield from self.run(self.q.backward, Home.BACKWARD, len(self.q.forward))
        self.upstream = before
        return {home: self.memory[home].clone() for home in GRADIENTS if home in self.memory}

    def run(self, steps: Sequence[Step], scratch: Home, start: int) -> Exchange:
        self.memory[scratch] = unknown(self.q.arenas[scratch])
        for home in GRADIENTS:
            firsts = [self.q.lives[n][0] for n, b in self.q.buffers.items() if b.home is home]
            if firsts and start <= min(firsts) < start + len(steps):
                self.memory[home] = unknown(gradient_size(self.p, home))
        own = (*GRADIENTS, Home.SAVED, scratch)
        lives, held = self.q.lives, sum(len(self.memory[x]) for x in own if x in self.memory)
        outside = {n: b.size for n, b in self.q.buffers.items() if b.home is Home.OUTSIDE}
        for number, step in enumerate(steps, start):
            live = sum(outside[n] for n in outside if lives[n][0] <= number <= lives[n][1])
            self.held = max(self.held, held + live)
            yield from self.step(step)
            for name in (*step.reads, *step.writes):
                is_saved = lives[name][0] < len(self.q.forward) <= number
                is_saved &= self.q.buffers[name].home in (Home.SAVED, Home.OUTSIDE)
                is_saved &= not self.is_spent
                if lives[name][1] == number and not is_saved:
                    self.bytes(name).fill_(255)
        del self.memory[scratch]

    def bytes(self, name: str) -> Tensor:
        b = self.q.buffers[name]
        if b.home is Home.OUTSIDE:
            return self.outside.setdefault(name, unknown(b.size))
        assert b.home is not None
        return self.memory[b.home][b.offset : b.end]

    def view(self, name: str) -> Tensor:
        b, part = self.q.buffers[name], self.bytes(name)
        if name == "order":
            return part.view(torch.int64).view(b.rows, 2)
        return part.view(DTYPES[b.item] if b.item > 1 else torch.float32).view(b.rows, -1)

    def value(self, names: Sequence[str]) -> Tensor:
        """Return sums, which may be in two pieces, of at most the columns of the first."""
        whole = self.view(names[0]).double()
        for low in names[1:]:
            whole = whole + self.view(low)[:, : whole.shape[1]]
        return whole

    def put(self, names: Sequence[str], rows: Any, sums: Tensor) -> None:
        """Write rows of sums, in as many pieces as there are names."""
        own = self.view(names[0])
        own[rows] = sums.to(own.dtype)
        for low in names[1:]:
            self.view(low)[rows, : sums.shape[1]] = (sums - own[rows].double()).float()

    def step(self, s: Step) -> Exchange:
        p, x, v = self.p, self.x, self.view
        if s.kind is Kind.SELECT:
            counts = x.target != IGNORED
            order = torch.cat([counts.nonzero()[:, 0], (~counts).nonzero()[:, 0]])
            v("order")[:-1] = torch.stack([order, x.target[order]], 1)
            v("order")[-1, 0] = counts.sum()
            return
        order, count = torch.arange(p.tokens), p.tokens
        if "order" in s.reads:
            order, count = v("order")[:-1, 0].clone(), int(v("order")[-1, 0])
        r = torch.arange(s.rows[0], max(min(s.rows[1], count), s.rows[0]))
        r = r[self.far[r]] if s.repairs else r
        k, t = r - s.rows[0], order[r]
        y = x.target[t] - x.first
        own, at = (y >= 0) & (y < p.vocab) & (x.target[t] != IGNORED), y.clamp(0, p.vocab - 1)
        every_r = torch.arange(count)
        every_y = x.target[order[every_r]] - x.first
        (c, d), kind = s.columns, s.kind
        states = [name for name in s.reads if name.startswith(("states", "plain", "scaled"))]
        h = v(states[0])[k].double() if states else x.h[t].double()
        w, bias = x.w.double(), x.bias.double()
        match kind:
            case Kind.CLASS_ROW:
                v("class_row")[0] = torch.cat([w.sum(0), bias.sum()[None]])
            case Kind.GATHER:
                made = x.h[t].double()
                if "factors" in s.reads:
                    made = made * v("factors")[r, SCALE, None]
                self.put(s.writes, k, made)
            case Kind.TARGET_LOGIT:
                logits = (x.h[t].double() * w[at]).sum(1) + bias[at]
                found = torch.where(own, logits, 0)
                v("logits")[r, 0] = found.where(x.target[t] != IGNORED, torch.inf)
                if p.every_class:
                    row = v("class_row")[0]
                    v("logits")[r, 1] = x.h[t].double() @ row[:-1] + row[-1]
            case Kind.CLEAR:
                v(s.writes[0]).fill_(0)
            case Kind.PROJECT:
                relative = "logits", "stats", "numbers", "factors"
                (reference,) = [n for n in s.reads if n in relative]
                column = RELATIVE_TO if reference in ("numbers", "factors") else REFERENCE
                u = h @ w[c:d].T + bias[c:d] - v(reference)[r, column, None]
                here = own & (y >= c) & (y < d)
                u[here, y[here] - c] = -torch.inf
                for name in s.writes:
                    made = u.exp() if name.startswith("exps") else u.logsumexp(1)[:, None]
                    into = v(name)
                    into[k, : made.shape[1]] = made.to(into.dtype)
            case Kind.ALL_GATHER:
                total = torch.cat([v(name)[k] for name in s.reads], 1).logsumexp(1)
                v(s.writes[0])[k] = yield kind, total
            case Kind.ALL_REDUCE:
                v("logits")[r] = yield kind, v("logits")[r]
            case Kind.REDUCE:
                parts = [n for n in s.reads if n.startswith(("partial", "shares"))]
                logits = v("logits")[r]
                target, counts = logits[:, 0], logits[:, 0] < torch.inf
                total = torch.cat([v(name)[k] for name in parts], 1).logsumexp(1)
                total = torch.where(counts, total, -torch.inf)
                far = total > SLACK
                self.far[r] = far
                moved = torch.where(far, total, 0)
                others, one = (total - moved).exp(), (-moved).exp()
                loss = moved + (others + one).log()
                if p.every_class:
                    mean = logits[:, 1] / x.classes - target
                    loss = loss - x.smoothing * torch.where(counts, mean, 0)
                if x.other is not None:
                    logit = (x.h[t].double() * w[x.other[t]]).sum(1) + bias[x.other[t]]
                    loss = loss - x.share * torch.where(counts, logit - target, 0)
                loss = torch.where(counts, loss, 0) * x.row_weight[t]
                v("stats")[r] = torch.stack([target + moved, others, others + one, loss], 1)
            case Kind.LOSS:
                losses = v("stats")[every_r, LOSS]
                self.loss = torch.zeros(p.tokens, dtype=torch.float64)
                self.loss[order[every_r]] = losses
                if p.upstream is not Upstream.ROWS:
                    self.loss = self.loss.sum() / counted(x.target)
            case Kind.COEFFICIENTS:
                stats, g = v("stats")[r], self.upstream.expand(p.tokens)[t] * x.row_weight[t]
                if p.upstream is not Upstream.ROWS:
                    g = g / counted(x.target)
                g = torch.where(x.target[t] == IGNORED, 0, g)
                target = g * (x.smoothing + x.share - stats[:, OTHERS] / stats[:, TOTAL])
                every, last = -g * x.smoothing / x.classes, stats[:, REFERENCE]
                planes = {
                    0: (g / stats[:, TOTAL], target, every, last),
                    1: (g, target, every, last + stats[:, TOTAL].log()),
                }
                for number, name in enumerate(s.writes, int(s.final)):
                    v(name)[r] = torch.stack(planes[number], 1)
                self.relative = s.final
            case Kind.ENTRIES:
                assert x.other is not None
                less = x.share * (1 if self.relative else v("stats")[r, TOTAL])
                less = torch.where(x.target[t] == IGNORED, 0, less)
                other = x.other[t]
                if s.writes[0].startswith("sums"):
                    self.put(s.writes, k, self.value(s.writes)[k] - less[:, None] * w[other])
                else:
                    e, inside = self.exps(s), (other >= c) & (other < d)
                    made = e[k[inside], other[inside] - c] - less[inside]
                    e[k[inside], other[inside] - c] = made.to(e.dtype)
            case Kind.SCALE_EXPS:
                e, inside = self.exps(s), own & (y >= c) & (y < d)
                made = e[k].double() * v("factors")[r, SCALE, None]
                made[inside, y[inside] - c] = v("factors")[r, TARGET][inside]
                e[k] = made.to(e.dtype)
            case Kind.LIST_TARGETS:
                v(s.writes[0]).fill_(1.0)
            case Kind.GEMM_HIDDEN:
                e = self.exps(s)[k].double()
                sums = e @ w[c:d]
                self.put(s.writes, k, sums + self.value(s.writes)[k] if s.adds else sums)
            case Kind.GEMM_WEIGHT | Kind.BIAS:
                (factors,) = [n for n in s.reads if n in ("factors", "numbers")]
                f, e = v(factors), self.exps(s)[k].double()
                of_weight = kind is Kind.GEMM_WEIGHT
                is_scaled = self.q.scales_exps or any("scaled" in n for n in s.reads)
                e = e if of_weight and is_scaled else e * f[r, SCALE, None]
                sums = e.T @ h if of_weight else e.sum(0)[:, None]
                if s.final and not (of_weight and self.q.scales_exps):
                    if of_weight:
                        assert v("listed").item() == 1.0
                    one = torch.ones(count, 1, dtype=torch.float64)
                    states_of_all = x.h[order[every_r]].double() if of_weight else one
                    here = (every_y >= c) & (every_y < d)
                    terms = f[every_r, TARGET, None] * states_of_all
                    sums.index_add_(0, every_y[here] - c, terms[here])
                    if p.every_class:
                        sums += (f[every_r, EVERY, None] * states_of_all).sum(0)
                rows = slice(c, d) if s.writes[0] in ("into", "dw") else slice(None)
                if of_weight:
                    before = self.value(s.writes)[rows] if s.adds else 0
                    self.put(s.writes, rows, sums + before)
                else:
                    out = v(s.writes[0])[0, c:d]
                    out.copy_(sums[:, 0] + (out if s.adds else 0))
            case Kind.RESCALE:
                self.put(s.writes, k, self.value(s.writes)[k] / v("stats")[r, TOTAL, None])
            case Kind.KEEP_HIDDEN:
                sums = self.value(["sums"])[k]
                if s.final:
                    sums = self.finished(sums, v("factors")[r], own, at)
                self.put(s.writes, t, sums)
            case Kind.FINISH_HIDDEN:
                names = [n for n in s.reads if n in ("sums", "dx") or "low" in n]
                in_order = "low of dx" in names or self.q.in_forward
                sums = self.value(names)[t if in_order else k]
                (factors,) = [n for n in s.reads if n in ("factors", "numbers", "last factors")]
                made = sums
                if not is_rounded(self.q):
                    made = self.finished(sums, v(factors)[r], own, at)
                v(s.writes[0])[order[count:]] = 0
                self.put(s.writes, t, made)
            case Kind.FINISH_WEIGHT:
                factor = 1 if p.upstream is Upstream.KNOWN else self.upstream
                sums = self.value(s.reads) * factor
                before = self.value(s.writes[:1]) if s.adds else 0
                self.put(s.writes[:1], slice(None), sums + before)
                for name in s.writes[1:]:
                    v(name).fill_(torch.nan)
            case Kind.FINISH_BIAS:
                times = self.q.in_forward and p.upstream is not Upstream.KNOWN
                self.put(s.writes, slice(None), v(s.reads[0]) * (self.upstream if times else 1))

    def finished(self, sums: Tensor, factors: Tensor, own: Tensor, at: Tensor) -> Tensor:
        target = torch.where(own, factors[:, TARGET], 0)[:, None] * self.x.w[at].double()
        made = factors[:, SCALE, None] * sums + target
        if self.p.every_class:
            made = made + factors[:, EVERY, None] * self.view("class_row")[0, :-1]
        return made

    def exps(self, s: Step) -> Tensor:
        (name,) = [name for name in s.reads if name.startswith("exps")]
        return self.view(name)[:, : s.columns[1] - s.columns[0]]


def unknown(size: int) -> Tensor:
    """Return memory in which every number is NaN."""
    return torch.full((size,), 255, dtype=torch.uint8)


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum().clamp(min=1)


def is_rounded(q: Program) -> bool:
    """Whether rows of dX are final in the forward."""
    return any(step.kind is Kind.KEEP_HIDDEN and step.final for step in q.forward)


def gradient_size(p: LossProblem, home: Home) -> int:
    """Return the bytes of a gradient."""
    return {
        Home.DX: p.tokens * p.hidden * p.item,
        Home.DW: p.vocab * p.hidden * p.dw_item,
        Home.DBIAS: p.vocab * p.item,
    }[home]


def together(ranks: Sequence[Exchange]) -> list[Any]:
    """Run the calls of all ranks in step; return their results."""
    sent: list[Any] = [None] * len(ranks)
    while True:
        asked, results = [], []
        for rank, part in zip(ranks, sent, strict=True):
            try:
                asked.append(rank.send(part))
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert not asked, "ranks differ in what they exchange"
            return results
        parts = torch.stack([part for _, part in asked])
        whole = parts.sum(0) if asked[0][0] is Kind.ALL_REDUCE else parts.T
        sent = [whole.clone() for _ in ranks]
