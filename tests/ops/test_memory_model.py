"""Measured peak memory of a step is what the planner predicts."""

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.ops.interface.arguments import (
    LossCall,
    LossOptions,
    Sharding,
    StepOptions,
    TensorOptions,
)
from cutefce.ops.interface.checks import workspace_bytes
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.rows.targets import OUTPUTS
from tests.support.layouts import Layout, pinned_plan, predicted
from tests.support.memory import peaks
from tests.support.reference import random_case
from tests.support.tiers import rest_slow

pytestmark = pytest.mark.compiled_rows


def measure(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: str,
    workspace: int | str | None,
    reduction: str = "mean",
    grad_hidden: bool = True,
    grad_weight: bool = True,
) -> tuple[int, int]:
    """Return predicted and measured workspace in bytes."""
    # kernels of all the shapes before could be so many that this one's would run unfused
    torch.compiler.reset()
    case = random_case(*shape, dtype=dtype, device=device, ignored=0)
    case.h.requires_grad_(grad_hidden)
    case.w.requires_grad_(grad_weight)
    wanted = [x for x in (case.h, case.w) if x.requires_grad]

    def step() -> None:
        loss = cutefce.linear_cross_entropy(
            case.h, case.w, case.y, reduction=reduction, workspace=workspace
        )
        if wanted:
            torch.autograd.grad(loss.sum(), wanted)

    step()
    plan = cutefce.plan(case.h, case.w, reduction=reduction, workspace=workspace)
    gradients = sum(plan.problem.gradient_bytes().values())
    return plan.workspace_bytes, peak_bytes(step, device) - gradients


RANDOM = {"few": range(12), "others": range(12, 1000)}


@pytest.mark.parametrize("seeds", rest_slow(RANDOM))
def test_the_peak_of_random_problems_is_predicted(seeds: range, device: str) -> None:
    """Within 1 % or 1 MiB."""
    for seed in seeds:
        if device != "cpu" and seed >= 100:
            return
        draw, more = random.Random(seed), 1 if device == "cpu" else 3
        tokens, vocab = (int(2 ** draw.uniform(*span)) for span in ((0, 11 + more), (3, 14 + more)))
        hidden = 8 * int(2 ** draw.uniform(0, 6 + more))
        while tokens * vocab > 1 << (24 if device == "cpu" else 30):
            tokens //= 2
        dtype = draw.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        trained = draw.choice([(True, True), (True, True), (True, False), (False, True)])
        reduction = draw.choice(["mean", "mean", "none"])
        workspace = draw.choice(["max", "min", None, 4 << 20, 16 << 20])
        predicted, measured = measure(
            (tokens, hidden, vocab), dtype, device, workspace, reduction, *trained
        )
        assert abs(predicted - measured) <= max(0.01 * measured, 1 << 20), seed


@dataclass(frozen=True)
class Pinned:
    """A call whose layout is given: sizes, and what it trains."""

    shape: tuple[int, int, int]
    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    trained: tuple[bool, bool] = (True, True)


MANY = 8192, 128, 16001
"""So many tokens that blocks of rows are small beside them."""
SQUARE, WIDE = (4096, 256, 8192), (3000, 128, 20000)
CHUNKS = {
    SQUARE: Layout(in_chunks=True, chunk=1024, low_bits=4),
    WIDE: Layout(in_chunks=True, chunk=768, low_bits=4),
}
KINDS: dict[str, dict[str, Any]] = {
    "dX and dW, float32": {"dtype": torch.float32},
    "dX and dW": {},
    "dX": {"trained": (True, False)},
    "dW, float32": {"dtype": torch.float32, "trained": (False, True)},
}
SHORT = Layout(in_chunks=True, chunk=128, low_bits=4)
PINNED = {
    "windows, dX in 20 bits, all stored": Pinned(MANY, Layout(kept=8192 + 4096, hidden_bits=4)),
    "windows, dX in 24 bits": Pinned(MANY, Layout(hidden_bits=8)),
    "windows, dX in 24 bits, half stored": Pinned(MANY, Layout(kept=8192, hidden_bits=8)),
    "short chunks": Pinned((512, 1024, 8192), SHORT),
    "short chunks, float32": Pinned((512, 1024, 8192), SHORT, torch.float32),
}
PINNED |= {
    f"chunks of {layout.chunk}, {name}": Pinned(shape, layout, **kind)
    for name, kind in KINDS.items()
    for shape, layout in CHUNKS.items()
}
# the smallest one is not slow
PINNED = {"short chunks": PINNED["short chunks"]} | PINNED


@pytest.mark.parametrize("given", rest_slow(PINNED))
def test_the_peak_of_a_layout_is_predicted(given: Pinned, device: str) -> None:
    torch.compiler.reset()
    case = random_case(*given.shape, dtype=given.dtype, device=device, ignored=0)
    h, w = (x.requires_grad_(on) for x, on in zip((case.h, case.w), given.trained, strict=True))
    found = predicted(given.layout, h, w)
    results = sum(x.nbytes for x in (h, w) if x.requires_grad)

    def step() -> None:
        with pinned_plan(found):
            loss = cutefce.linear_cross_entropy(h, w, case.y)
        loss.backward()
        h.grad = w.grad = None

    step()
    measured = peak_bytes(step, device) - results
    assert abs(found.workspace_bytes - measured) <= max(0.05 * measured, UNPREDICTED_BYTES)


BATCH = 25
"""Calls measured at once."""
DRAWS = [(0, 1), *((seed, 10) for seed in range(1, 6))]
"""A seed, and how often so many are drawn."""
UNPREDICTED_BYTES = 1 << 20
"""Several small tensors of all tokens."""
BLOCK_BYTES = 3 << 20
"""A block of rows and of their repaired exponentials, which few calls need."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def operand(r: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix in one of the layouts that users pass."""
    whole = torch.randn(rows, columns).to(dtype)
    layout = r.choice(["plain", "plain", "transposed", "every other column", "rows apart"])
    if layout == "transposed":
        return whole.t().contiguous().t()
    apart = torch.zeros(rows, 2 * columns, dtype=dtype)
    view = apart[:, ::2] if layout == "every other column" else apart[:, :columns]
    return whole if layout == "plain" else view.copy_(whole)


@dataclass(frozen=True)
class Call:
    """A step with gradients, and what is predicted of it."""

    words: str
    run: Callable[[], None]
    gradient_bytes: int
    budget: int
    predicted: int
    least: int
    """Predicted for "min"."""
    ignores: bool
    """Whether some tokens do not count."""


def random_call(r: random.Random) -> Call:
    """Return any call that users make, small."""
    tokens, hidden = int(2 ** r.uniform(0, r.choice([8, 11]))), int(2 ** r.uniform(0, 9.5))
    vocab = int(2 ** r.uniform(0, 15))
    while tokens * vocab > 3e6 or tokens * hidden * vocab > 2e8:
        tokens, hidden, vocab = tokens // 2 + 1, hidden * 2 // 3 + 1, vocab * 2 // 3 + 1
    dtype, reduction = r.choice(DTYPES), r.choice(["mean", "mean", "none", "sum"])
    trained = r.choice([(True, True), (True, True), (True, False), (False, True)])
    cast = r.choice([None, None, None, torch.bfloat16, torch.float16])
    dtypes = (r.choice([dtype, torch.float32]), dtype) if cast else (dtype, dtype)
    if cast and torch.float64 in dtypes:  # which autocast leaves alone
        dtypes = torch.float32, torch.float32
    h, w = operand(r, tokens, hidden, dtypes[0]), operand(r, vocab, hidden, dtypes[1])
    y = torch.randint(vocab, (tokens,))
    y[torch.rand(tokens) < r.choice([0, 0.3])] = -100
    if r.random() < 0.2:  # as where labels are shifted, each sequence without its last token
        sequences = torch.stack([h, h], 1).view(tokens, 2, hidden).transpose(0, 1)
        h = torch.cat([sequences, sequences[:, :1]], 1)[:, :-1]
        y = torch.stack([y, y])
    h.requires_grad_(trained[0])
    w.requires_grad_(trained[1])
    wanted = [x for x in (h, w) if x.requires_grad]
    workspace = r.choice([None, "min", "max", *[int(2 ** r.uniform(8, 25)) for _ in range(3)]])

    def region() -> Any:
        return torch.autocast("cpu", cast) if cast else contextlib.nullcontext()

    def call() -> None:
        with region():
            loss = cutefce.linear_cross_entropy(h, w, y, reduction=reduction, workspace=workspace)
        torch.autograd.grad(loss, wanted, torch.ones_like(loss))

    with region():
        # "min" is no limit of its own
        floor = "min" if workspace == "min" else 0
        least = cutefce.plan(h, w, reduction=reduction, workspace=floor).workspace_bytes
        plan = cutefce.plan(h, w, reduction=reduction, workspace=workspace)
    operands = ", ".join(
        f"{x.dtype} {tuple(x.shape)} strides {x.stride()} trained {x.requires_grad}" for x in (h, w)
    )
    return Call(
        words=f"{operands}, {reduction}, {cast=}, {workspace=}: {plan}",
        run=call,
        gradient_bytes=sum(x.numel() * x.element_size() for x in wanted),
        budget=workspace_bytes(workspace),
        predicted=plan.workspace_bytes,
        least=least,
        ignores=bool((y == -100).any()),
    )


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Collect no garbage, which would hide allocations."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("draws", rest_slow(DRAWS))
def test_no_call_takes_more_than_predicted_and_budgeted(
    draws: tuple[int, int], undisturbed: None
) -> None:
    seed, batches = draws
    r = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(batches):
        calls = [random_call(r) for _ in range(BATCH)]
        for call, peak in zip(calls, peaks([call.run for call in calls]), strict=True):
            taken = peak - call.gradient_bytes
            found = f"{call.words}; taken {taken / 2**20:.2f} MiB"
            assert call.predicted <= call.budget or call.predicted == call.least, found
            assert taken <= call.predicted + UNPREDICTED_BYTES, found
            # tokens that do not count may take nothing
            assert call.ignores or call.predicted <= 1.1 * taken + BLOCK_BYTES, found


def peak_of(step: Callable[[], object], device: str, *leaves: torch.Tensor) -> int:
    """Return the bytes that a step takes beside the gradients of `leaves`."""
    torch.compiler.reset()
    step()
    return peak_bytes(step, device) - sum(x.nbytes for x in leaves)


CALLS = ["soft targets", "classes", "a forward alone", "a bfloat16 buffer"]
CALLS += ["a float32 buffer", "a float32 buffer of a known gradient"]


@pytest.mark.parametrize("workspace", rest_slow(["min", "max", 20 << 20]))
@pytest.mark.parametrize("dtype", rest_slow([torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("kind", CALLS)
def test_the_peak_of_other_calls_is_predicted(
    kind: str, dtype: torch.dtype, workspace: int | str, device: str
) -> None:
    tokens, hidden, vocab = 512, 128, 16001
    case = random_case(tokens, hidden, vocab, dtype=dtype, device=device, ignored=0)
    h, w = case.h.requires_grad_(), case.w.requires_grad_()
    options: dict[str, Any] = {"workspace": workspace}
    leaves: list[torch.Tensor] = [h, w]
    target: torch.Tensor | None = case.y
    if kind == "soft targets":
        options["target_indices"] = torch.randint(vocab, (tokens, 64), device=device)
        options["target_probs"], target = torch.rand(tokens, 64, device=device) + 0.1, None
    elif kind == "classes":
        index = torch.randint(vocab, (tokens, 128), device=device)
    elif "buffer" in kind:
        sums = torch.float32 if dtype == torch.float32 or "float32" in kind else dtype
        options["accumulate_into"] = torch.zeros(vocab, hidden, dtype=sums, device=device)
        leaves = [h]
        if "known" in kind:
            options["grad_output"] = torch.ones((), device=device)

    def step() -> None:
        if kind == "classes":
            found = cutefce.linear_log_probs(h, w, target_indices=index, workspace=workspace)
            torch.autograd.grad(found.log_probs, (h, w), torch.randn_like(found.log_probs))
            return
        with torch.set_grad_enabled(kind != "a forward alone"):
            loss = cutefce.linear_cross_entropy(h, w, target, **options)
        if loss.requires_grad:
            torch.autograd.grad(loss, leaves)

    if kind == "classes":
        asked = LossOptions(reduction=OUTPUTS, outputs="lse")
        own = StepOptions(workspace_bytes(workspace), True, True, False), asked
        records = *own, TensorOptions(target_indices=index), Sharding()
        plan = plan_for(LossCall(h, w, index[:, 0], *records))
    else:
        with torch.set_grad_enabled(kind != "a forward alone"):
            plan = cutefce.plan(h, w, **options)
    measured = peak_of(step, device, *([] if kind == "a forward alone" else leaves))
    assert abs(plan.workspace_bytes - measured) <= max(0.1 * measured, UNPREDICTED_BYTES)
    if kind == "a forward alone":
        assert measured < 2 / 3 * tokens * vocab * dtype.itemsize, "no room for logits"


@pytest.mark.parametrize("cast", rest_slow([torch.bfloat16, None]))
def test_copies_of_operands_are_predicted(cast: torch.dtype | None) -> None:
    """A weight of every other column, and hidden states of all but each sequence's last token."""
    w = torch.randn(16001, 512)[:, ::2].detach().requires_grad_()
    h = torch.randn(4, 65, 256)[:, :-1].detach().requires_grad_()
    for own in ((h, w.detach().contiguous()), (h.detach()[:, :32].contiguous(), w), (h, w)):
        y = torch.randint(len(w), own[0].shape[:-1])
        leaves = [x for x in own if x.requires_grad]

        def region() -> Any:
            return torch.autocast("cpu", cast) if cast else contextlib.nullcontext()

        def step(own: Any = own, y: torch.Tensor = y, leaves: Any = leaves) -> None:
            with region():
                loss = cutefce.linear_cross_entropy(own[0], own[1], y, workspace=12 << 20)
            torch.autograd.grad(loss, leaves)

        with region():
            predicted = cutefce.plan(*own, workspace=12 << 20).workspace_bytes
        taken = peak_of(step, "cpu", *leaves)
        assert abs(predicted - taken) <= 0.05 * taken
