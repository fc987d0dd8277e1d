"""Sampled gradients: those of the entries that the seed keeps, and unbiased."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.interface import call
from cutefce.ops.interface.arguments import LossOptions, Sharding, StepOptions, TensorOptions
from cutefce.ops.operators import saved
from cutefce.ops.primitives import dispatch
from cutefce.ops.sampling import sample_sizes
from cutefce.ops.sampling.random_bits import random_bits, row_states
from tests.support import sampled as model
from tests.support.backends import KERNELS, Backend
from tests.support.options import OPTIONS, TOGETHER, OptionsCase, options_case, soft_case
from tests.support.reference import Case, are_same, random_case
from tests.support.tiers import pairwise, rest_slow

SHAPE = (60, 24, 333)
SAMPLED: dict[str, Any] = {"gradient": "sampled", "samples": 16}
GREAT = 1 << 20
NAMES = {name: [name] for name in OPTIONS} | TOGETHER | {"none": []}


@pytest.fixture
def dtype(small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Serve calls by models of kernels; return the dtype of operands."""
    KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles)
    return torch.bfloat16


def drawn(x: OptionsCase, seed: int = 0, **more: Any) -> tuple[Tensor, ...]:
    """Return loss and sampled gradients, drawn after `manual_seed`."""
    torch.manual_seed(seed)
    return x.ours(**SAMPLED | more)


def eager(*arguments: Any, **options: Any) -> Tensor:
    result: Tensor = cutefce.linear_cross_entropy(*arguments, **options)
    return result


def assert_keeps_entries(
    x: OptionsCase, got: tuple[Tensor, ...], exact: tuple[Tensor, ...], seed: Tensor, **more: Any
) -> None:
    """Beside the noise of the kept entries, errors are at most twice those of exact gradients.

    Or twice those of rounding the result, if these are larger.
    """
    noisy, whole = (model.sampled(x, seed, samples, **more) for samples in (16, GREAT))
    for a, b, c, d in zip(got[1:], noisy[1:], exact[1:], whole[1:], strict=True):
        of_exact, of_rounding = (c.double() - d).norm(), (b.to(a.dtype).double() - b).norm()
        assert float((a.double() - b).norm()) <= 2 * float(torch.maximum(of_exact, of_rounding))
    assert float((got[1] - exact[1]).norm()) > 0.01 * float(exact[1].norm())


def test_a_graph_that_is_traced_without_gradients_draws_a_seed_when_it_is_trained(
    dtype: torch.dtype,
) -> None:
    case = random_case(*SHAPE, dtype=dtype)

    def loss(h: Tensor) -> Tensor:
        result: Tensor = torch.ops.cutefce.loss(h, case.w, case.y, **SAMPLED)
        return result

    traced = make_fx(loss)(case.h)
    found = []
    for run, seed in ((traced, 0), (loss, 0), (traced, 1)):
        torch.manual_seed(seed)
        h = case.h.clone().requires_grad_()
        found.append(torch.autograd.grad(run(h), h)[0])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_the_bits_are_those_of_their_definition() -> None:
    seed = torch.tensor([-5, 1 << 30], dtype=torch.int32)
    rows, columns = torch.tensor([0, 1, 77, 1 << 20]), torch.arange(70_000, 70_300)
    got = random_bits(row_states(seed, rows), columns)
    np.testing.assert_array_equal(model.words(got), model.bits(seed, rows, columns))


@pytest.mark.parametrize("seed", [(0, 0), (0, 1), (1, 0), (-7, 12345)])
def test_bits_are_uniform_and_independent(seed: tuple[int, int]) -> None:
    """Of each entry; and together with the next column, the next row and the next seed."""
    words = torch.tensor(seed, dtype=torch.int32)
    rows, columns = torch.arange(256), torch.arange(8192)
    x, y = (
        random_bits(row_states(s, rows), columns).double() / 2**32 + 0.5
        for s in (words, words + torch.tensor([0, 1], dtype=torch.int32))
    )
    count = x.numel()
    cells = torch.histc(x, 1024, 0, 1)
    chi_squared = float(((cells - count / 1024) ** 2 / (count / 1024)).sum())
    assert abs(chi_squared - 1023) < 5 * (2 * 1023) ** 0.5
    few = x < 1 / 64
    for a, b in ((x[:, 1:], x[:, :-1]), (x[1:], x[:-1]), (x, y)):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 4.5 * count**-0.5
        both = ((a < 1 / 64) & (b < 1 / 64)).double().mean()
        assert abs(float(both) - 64.0**-2) < 4.5 * (64.0**-2 / a.numel()) ** 0.5
    for dim, size in ((1, 8192), (0, 256)):
        spread = few.sum(dim).double().var() / (size * 63 / 64**2)
        assert abs(float(spread) - 1) < 5 * (2 / few.shape[1 - dim]) ** 0.5


@pairwise(
    names=NAMES,
    dtype=[torch.bfloat16, torch.float16],
    kernels=KERNELS,
    reduction=["none", "mean", "sum"],
)
def test_gradients_are_those_of_the_kept_entries(
    names: list[str],
    dtype: torch.dtype,
    kernels: Backend,
    reduction: str,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And losses are those of the exact call, bit for bit."""
    kernels.serve(monkeypatch, small_tiles)
    x = options_case(names, *SHAPE, dtype=dtype, logit_std=2.0)
    torch.manual_seed(1)
    seed = model.next_seed()
    got = x.ours(**SAMPLED, reduction=reduction)
    exact = x.ours(reduction=reduction, workspace="min")
    if reduction == "none":
        assert torch.equal(got[0], exact[0])
    else:
        torch.testing.assert_close(got[0], exact[0], rtol=1e-5, atol=1e-5)
    assert_keeps_entries(x, got, exact, seed, reduction=reduction)


NOT_SERVED: dict[str, tuple[Callable[[], OptionsCase], int]] = {
    "float32": (lambda: options_case(["linear_bias"], *SHAPE), 16),
    "many samples": (lambda: options_case([], *SHAPE, dtype=torch.bfloat16), 4096),
    "soft targets": (lambda: soft_case([], 7, *SHAPE, dtype=torch.bfloat16), 16),
}
"""Cases that no kernel samples, with samples."""


@pytest.mark.parametrize("served", [False, True], ids=["portable", "kernels"])
@pytest.mark.parametrize("make", rest_slow(NOT_SERVED))
def test_gradients_are_exact_where_no_kernel_samples(
    make: tuple[Callable[[], OptionsCase], int],
    served: bool,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, in the same plan; strict mode says that nothing is sampled."""
    x = make[0]()
    options: dict[str, Any] = {"gradient": "sampled", "samples": make[1]}
    if served and x.case.h.dtype == torch.bfloat16:
        KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles)
    assert all(map(torch.equal, x.ours(**options), x.ours()))
    monkeypatch.setattr(dispatch, "_strict", True)
    with pytest.raises(RuntimeError, match="cutefce: the kernels cannot serve this call: "):
        x.ours(**options)


def repeated(x: OptionsCase, count: int) -> OptionsCase:
    """Return a case of each token `count` times: its rows are independent draws."""
    case = x.case
    tokens = (each.repeat_interleave(count, 0) for each in (case.h, case.y, case.upstream))
    h, y, upstream = tokens
    return OptionsCase(type(case)(h, case.w, y, upstream), x.options)


@pytest.mark.parametrize(
    ("columns", "each"),
    [
        pytest.param(4096, 512, marks=pytest.mark.slow, id="exact lse"),
        pytest.param(20, 128, id="estimated"),
    ],
)
def test_gradients_are_unbiased(
    columns: int, each: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means of so many draws of `each` of 8 seeds are within 4 standard errors."""
    model.estimate_of(columns, monkeypatch)
    seeds, samples = 8, 16
    x = options_case(["linear_bias"], 3, 8, 70, dtype=dtype, logit_std=2.0, ignored=0)
    x.case.upstream.fill_(1)
    draws = repeated(x, each)
    results = [[part.double() for part in drawn(draws, seed)] for seed in range(seeds)]
    dx = torch.cat([dx.view(3, each, -1) for _, dx, _, _ in results], 1)
    dw, db = (
        torch.stack(parts).sum(0) / (seeds * each) for parts in [*zip(*results, strict=True)][2:]
    )
    (_, *want), (p, _) = model.sampled(x, model.next_seed(), GREAT), model.relative(x)
    p = p.scatter(1, x.case.y[:, None], 0)
    q = torch.ones_like(p)
    if columns > 70:
        q = (p * samples).clamp(max=1)
        assert float(q.sum(1).amax()) < samples
    error = dx.std(1) / (seeds * each) ** 0.5
    assert float(((dx.mean(1) - want[0]).abs() / error).amax()) < 4
    if columns < 70:  # every seed has its own estimates, and variances
        assert float((dw - want[1]).norm()) < 0.01 * float(want[1].norm())
        return
    variance = torch.where(p > 0, p.square() * (1 / q - 1), 0) / (seeds * each)
    h, w = x.case.h.double(), x.case.w.double()
    for got, true, factor in ((dw, want[1], h), (db, want[2], torch.ones(3, 1))):
        allowed = 4 * (variance.t() @ factor.double().square()).sqrt() + 1e-12
        allowed += torch.finfo(dtype).eps / 2 * true.view_as(allowed).abs()  # results are rounded
        assert bool(((got.view_as(allowed) - true.view_as(allowed)).abs() <= allowed).all())
    # Σ p (θ - p) |w|² over the entries below θ
    theta = 1 / samples
    spread = torch.where(p < theta, p * (theta - p), 0) @ w.square().sum(1)
    measured = dx.var(1).sum(1)
    assert bool(((measured / spread - 1).abs() < 0.1).all())


CASES: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.zeros(40, 200, dtype=torch.float64),
    "one column": lambda: torch.zeros(40, 200, dtype=torch.float64).index_fill_(
        1, torch.tensor([7]), 300.0
    ),
    "far above targets": lambda: 100 * torch.randn(40, 200, dtype=torch.float64),
}


@pytest.mark.parametrize("samples", [16, 2048])
@pytest.mark.parametrize("shape", [(0, 8, 7), (1, 8, 7), (5, 8, 1), (5, 3, 7), (1, 1, 1)], ids=str)
def test_small_sizes(
    shape: tuple[int, int, int],
    samples: int,
    small_tiles: PortableTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if shape[0]:  # no kernels serve no tokens
        KERNELS["kernels of sm_90a"].serve(monkeypatch, small_tiles)
    x = options_case([], *shape, dtype=torch.bfloat16, ignored=0)
    got, want = drawn(x, samples=samples), x.ours(workspace="min")
    assert torch.equal(got[0], want[0])
    if samples == 2048 or shape[2] == 1:  # every entry is kept
        whole = model.sampled(x, model.next_seed(), GREAT)
        for a, b, c in zip(got[1:], want[1:], whole[1:], strict=True):
            assert float((a - c).norm()) <= 2 * float((b - c).norm()) + 1e-9


@pytest.mark.parametrize("columns", [4096, 60, 20])
@pytest.mark.parametrize("logits", CASES.values(), ids=CASES)
def test_worst_cases(
    logits: Callable[[], Tensor],
    columns: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All is finite, the loss is exact, and gradients are near: of few entries, exact."""
    model.estimate_of(columns, monkeypatch)
    torch.manual_seed(0)
    z, w = logits().to(dtype), torch.eye(200, dtype=dtype)
    case = Case(z, w, torch.randint(200, (40,)), torch.ones(40))
    x = OptionsCase(case, {})
    got, want = drawn(x), x.ours(workspace="min")
    with torch.no_grad():
        assert torch.equal(got[0], eager(z, w, case.y, reduction="none"))
    assert all(bool(each.isfinite().all()) for each in got)
    assert float((got[1] - want[1]).norm()) < 0.5 * float(want[1].norm())
    if logits is not CASES["uniform"]:
        allowed = 1e-2 * float(want[1].norm())
        if columns < 200:  # a class may be drawn for 170 of 30, so that l̂ is log(17 / 3) too high
            p = z.double().softmax(1).scatter(1, case.y[:, None], 0)
            variance = (p * (170 / columns * 2 / 16 - p).clamp(min=0)).sum()
            allowed += 3 * float(variance) ** 0.5
        assert float((got[1] - want[1]).norm()) < allowed


def test_estimates_far_too_high(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model.change_estimates(lambda lse: lse + 14, monkeypatch)
    x = options_case([], *SHAPE, dtype=dtype)
    assert all(bool(each.isfinite().all()) for each in drawn(x))


def test_all_tokens_ignored(dtype: torch.dtype) -> None:
    x = options_case(["linear_bias"], *SHAPE, dtype=dtype, ignored=1.1)
    for reduction in ("none", "mean"):
        assert all(not each.any() for each in drawn(x, reduction=reduction))


def test_what_a_nan_reaches_is_nan(dtype: torch.dtype) -> None:
    """As with exact gradients; what ignored tokens hold reaches nothing."""
    x = options_case(["linear_bias"], *SHAPE, dtype=dtype, ignored=0.3)
    x.case.h[x.case.y == -100] = torch.nan
    assert all(bool(each.isfinite().all()) for each in drawn(x))
    x.case.h[int((x.case.y >= 0).nonzero()[0])] = torch.nan
    for a, b in zip(drawn(x), x.ours(), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize(
    "trained", [(True, False, True), (False, True, False), (False, False, True)]
)
def test_a_frozen_operand_changes_nothing(trained: tuple[bool, ...], dtype: torch.dtype) -> None:
    x = options_case(["linear_bias"], *SHAPE, dtype=dtype)
    (_, *every), (_, *some) = drawn(x), drawn(x, trained=trained)
    want = [gradient for gradient, on in zip(every, trained, strict=True) if on]
    assert all(map(torch.equal, some, want))


@pairwise(
    names=[[], ["linear_bias", "label_smoothing"]],
    offset={"aligned": 0, "unaligned": 1},
    sums=[torch.float32, torch.bfloat16],
)
def test_gradients_are_added_to_a_buffer(
    names: list[str], offset: int, sums: torch.dtype, dtype: torch.dtype
) -> None:
    x = options_case(names, *SHAPE, dtype=torch.bfloat16)
    want, leaves = drawn(x), x.leaves
    memory = torch.ones(x.case.w.numel() + 8, dtype=sums)
    buffer = memory[offset : offset + x.case.w.numel()].view_as(x.case.w)
    torch.manual_seed(0)
    loss = x.loss(leaves, reduction="none", accumulate_into=buffer, **SAMPLED)
    loss.backward(x.case.upstream)
    assert leaves[1].grad is None
    ulp = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(buffer.double() - 1, want[2].double(), rtol=ulp, atol=4 * ulp)
    for leaf, gradient in zip(leaves[2:], want[3:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("finds", [True, False], ids=["kept", "computed again"])
def test_later_backwards_give_the_same_bits(
    finds: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = options_case([], *SHAPE, dtype=dtype)
    leaves = x.leaves
    loss = eager(*leaves, x.case.y, **SAMPLED)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    if not finds:
        monkeypatch.setattr(saved, "saved_with", lambda stats: None)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))


def test_log_probs_have_sampled_gradients(dtype: torch.dtype) -> None:
    case = random_case(*SHAPE, dtype=dtype)
    results: list[list[Any]] = []
    kinds: tuple[dict[str, Any], ...] = {"workspace": "min"}, SAMPLED
    for more in kinds:
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        torch.manual_seed(0)
        values = cutefce.linear_log_probs(h, w, case.y, outputs=("lse", "entropy"), **more)
        results.append([*values[:3]])
        assert values.lse is not None and values.entropy is not None
        (values.log_probs + values.lse).sum().backward()
        results[-1] += [h.grad, w.grad]
    want, got = results
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    assert all(map(torch.equal, got[3:], want[3:]))  # of the targets alone: no softmax is left
    with pytest.raises(NotImplementedError, match="gradient: got sampled with 'entropy'"):
        entropy = cutefce.linear_log_probs(h, w, case.y, outputs=("entropy",), **SAMPLED).entropy
        assert entropy is not None
        entropy.sum().backward()


def checkpointed(*arguments: Any, **options: Any) -> Tensor:
    result: Tensor = checkpoint(eager, *arguments, use_reentrant=False, **options)
    return result


LOSSES: dict[str, Callable[..., Tensor]] = {
    "checkpointed": checkpointed,
    "compiled": torch.compile(eager, fullgraph=True, dynamic=True),
    "compiled and checkpointed": torch.compile(checkpointed, fullgraph=True, dynamic=True),
}


@pytest.mark.parametrize("loss", rest_slow(LOSSES))
def test_the_same_seed_gives_the_same_bits(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.compiler.reset()
    x = options_case(["linear_bias", "temperature (N,)"], *SHAPE, dtype=dtype)
    steps = []
    for function in (eager, loss):
        torch.manual_seed(5)
        for _ in range(2):
            leaves = x.leaves
            value = function(*leaves[:2], x.case.y, **x.with_leaves(leaves), **SAMPLED)
            steps.append((value.detach(), *torch.autograd.grad(value, leaves)))
    first, second, *others = steps
    assert not torch.equal(first[1], second[1])
    for got, want in zip(others, (first, second), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_ignored_tokens_change_no_entries(dtype: torch.dtype) -> None:
    """Entries depend on a token's number in the call."""
    x = options_case([], *SHAPE, dtype=dtype, ignored=0)
    every = drawn(x)
    x.case.y[::3] = -100
    some = drawn(x)
    counts = x.case.y >= 0
    assert torch.equal(some[1][counts], every[1][counts])


def test_operators_pass_opcheck() -> None:
    case = random_case(5, 8, 9)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    step = StepOptions(0, True, True, False).pack()
    tensors = TensorOptions(seed=torch.zeros(2, dtype=torch.int32))
    more = *LossOptions(**SAMPLED).pack(), *tensors.pack(), *Sharding().pack()
    torch.library.opcheck(torch.ops.cutefce.loss_forward, (h, w, case.y, *step, *more))
    utils = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.cutefce.draw_seed, (case.y,), test_utils=utils)


@pytest.mark.parametrize("samples", [16, 17, 64, 256, 1000, 4096])
def test_slots_hold_what_is_expected(samples: int) -> None:
    """But for a probability below 1e-8, by Bernstein's bound of a sum of independent entries."""
    limit = sample_sizes.expected_limit(samples)
    beyond = sample_sizes.slots(samples, 1 << 20) - limit
    assert np.exp(-(beyond**2) / (2 * (limit + beyond / 3))) < 1e-8
    assert sample_sizes.slots(samples, 7) == 7


def test_flops_are_those_of_the_kept_entries() -> None:
    case = random_case(8, 16, 1000)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        eager(h, w, case.y, **SAMPLED).backward()
    assert counter.get_total_flops() == 2 * 8 * 16 * (1000 + 2 * 16)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [[], ["linear_bias", "softcap"]], ids=str)
def test_a_gpu_keeps_the_entries_of_their_definition(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever classes are drawn for the estimates; exact gradients where no kernels sample."""
    seed = torch.tensor([5, -9], dtype=torch.int32)
    on_gpu = seed.cuda()
    monkeypatch.setattr(call, "draw_seed", lambda like: on_gpu)
    x = options_case(names, *SHAPE, dtype=torch.bfloat16, device="cuda", logit_std=2.0)
    exact = x.ours(workspace="min")
    x.ours(**SAMPLED)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = x.ours(**SAMPLED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_cpu = options_case(names, *SHAPE, dtype=torch.bfloat16, logit_std=2.0)
    results = got, exact, x.ours()
    got, exact, planned = (tuple(each.cpu() for each in result) for result in results)
    if cutefce.plan(*x.leaves[:2], **SAMPLED).strategy == "sampled":
        assert_keeps_entries(on_cpu, got, exact, seed)
    else:
        assert all(map(torch.equal, got[1:], planned[1:]))


@pytest.mark.gpu
def test_replays_of_a_graph_draw_new_seeds() -> None:
    case = random_case(256, 64, 3000, dtype=torch.bfloat16, device="cuda")
    h, w = case.h.requires_grad_(), case.w.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = eager(h, w, case.y, **SAMPLED)
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # torch writes the generator's state on the stream of the capture, and again before a replay
    torch.cuda.synchronize()
    found = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        found.append([x.clone() for x in captured])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert torch.equal(found[0][0], found[1][0])
    is_sampled = cutefce.plan(h, w, **SAMPLED).strategy == "sampled"
    assert torch.equal(found[0][1], found[1][1]) != is_sampled
    torch.manual_seed(1)
    for a, b in zip(step(), found[0], strict=True):
        assert are_same(a, b)
