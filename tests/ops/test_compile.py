"""Graph compilers and exporters: sizes are never compared, and results are those of eager calls."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim, export

import cutefce
from bench.harness.timing import peak_bytes
from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.operators import operators, saved
from tests.support.divergence import Heads, heads
from tests.support.options import LOSSES, OptionsCase
from tests.support.outputs import OUTPUTS, ValuesCase, values_case
from tests.support.reference import are_same, random_case
from tests.support.stand_in_gpu import served_by_kernels
from tests.support.steps import WORKSPACES, gradients, have_same_bits, operands
from tests.support.tiers import rest_slow

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BUDGETS = [None, "min", 1 << 30, "max"]
DYNAMIC = {"min": 2, "max": 1 << 20}


@pytest.fixture(autouse=True)
def no_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def of_values(names: list[str], classes: int | None) -> Callable[..., Any]:
    return lambda *sizes, **how: values_case(names, classes, *sizes, outputs=OUTPUTS, **how)


def of_divergences(tokens: int, hidden: int, vocab: int, device: str) -> Heads:
    return heads(tokens, (hidden, 12), vocab, device=device)


FACTORS = ["linear_bias", "logit_scale", "temperature (N,)"]
TOGETHER = "class indices, smoothing and all factors"
CALLS: dict[str, Callable[..., Any]] = {
    TOGETHER: LOSSES[TOGETHER],
    "log-probabilities and the largest ones": of_values([], None),
    "divergences": of_divergences,
    **{name: make for name, make in LOSSES.items() if "factors" in name or name == "plain"},
    "log-probabilities of transformed logits": of_values(FACTORS, None),
    "log-probabilities of classes": of_values(FACTORS, 5),
    "outputs without a class": of_values([], 0),
}
"""What draws the arguments of a call, by its sizes and a device."""
DEFAULT = 3
"""The first of these are not slow."""


def results_of(x: Any, *leaves: Tensor) -> list[Tensor]:
    """Return what a call with these leaves returns, one of which comes from another step."""
    h, *others = leaves
    if isinstance(x, OptionsCase):
        return [x.loss((h * 2, *others))]
    if isinstance(x, Heads):
        w, teacher, teacher_w = others
        given: dict[str, Any] = {"divergence": "jsd", "beta": 0.3, "return_overlap": True}
        found: Any = cutefce.linear_divergence(h * 2, w, teacher, teacher_w, x.target, **given)
    else:
        found = x.values((h * 2, *others), top_k=3)
    return [value for value in found if value is not None]


@pytest.mark.parametrize("draw", rest_slow(CALLS, DEFAULT))
def test_compiled_calls_equal_eager_ones(
    draw: Callable[..., Any], small_tiles: PortableTiles, device: str
) -> None:
    """Calls of any number of tokens, compiled once."""
    backend = "aot_eager" if device == "cpu" else "inductor"
    compiled = torch.compile(results_of, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (40, 70, 31):
        x, found = draw(tokens, 16, 333, device=device), []
        leaves = (x.own if isinstance(x, ValuesCase) else x).leaves
        for function in (results_of, compiled):
            values = function(x, *leaves)
            total = torch.stack([v.square().sum() for v in values if v.requires_grad]).sum()
            found.append([*values, *torch.autograd.grad(total, leaves)])
        torch.testing.assert_close(*found)


def token_counts(count: int, most: int) -> list[int]:
    """Return random sizes, few and many tokens alike; one token and a repeated size are there."""
    draw = random.Random(count)
    sizes = [1, 2, 2, *(int(most ** draw.random()) for _ in range(count - 3))]
    draw.shuffle(sizes)
    return sizes


def torch_loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), y)


def mark(*tensors: Tensor) -> None:
    for x in tensors:
        torch._dynamo.mark_dynamic(x, 0, **DYNAMIC)


def graphs(
    loss: Loss, sizes: list[int], make: Callable[[int], tuple[Tensor, ...]], marked: bool
) -> int:
    """Return the number of graphs of training steps of these sizes, each checked against eager."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for tokens in sizes:
        if marked and tokens < DYNAMIC["min"]:
            continue
        h, w, y = make(tokens)
        if marked:
            mark(h, y)
        results = []
        for function in (compiled, loss):
            value = function(h, w, y)
            results.append((value, *torch.autograd.grad(value, (h, w))))
        if loss is not torch_loss and not h.is_meta:
            for got, expected in zip(*results, strict=True):
                assert are_same(got, expected), tokens
    return int(counter.frame_count)


KINDS: dict[str, tuple[int | str | None, torch.dtype, tuple[int, int]]] = {
    f"workspace {budget}, {'large' if head[0] > 40 else 'small'} head": (budget, dtype, head)
    for head, dtype in (((128256, 4096), torch.bfloat16), ((40, 8), torch.bfloat16))
    for budget in BUDGETS
}
KINDS |= {f"{dtype}": (None, dtype, (40, 8)) for dtype in DTYPES[1:]}
"""Workspaces, dtypes and sizes; large heads have no memory, and small ones results."""


@pytest.mark.parametrize("marked", rest_slow({"marked": True, "automatic": False}))
@pytest.mark.parametrize("kind", rest_slow(KINDS))
def test_no_more_graphs_than_torch(
    kind: tuple[int | str | None, torch.dtype, tuple[int, int]], marked: bool
) -> None:
    workspace, dtype, (vocab, hidden) = kind
    how: dict[str, Any] = {"dtype": dtype, "device": "meta" if vocab > 40 else "cpu"}
    w = torch.zeros(vocab, hidden, **how).requires_grad_()

    def make(tokens: int) -> tuple[Tensor, ...]:
        h = torch.zeros(tokens, hidden, **how).requires_grad_()
        return h, w, torch.zeros(tokens, dtype=torch.long, device=how["device"])

    def small(tokens: int) -> tuple[Tensor, ...]:
        case = random_case(tokens, 8, 40, dtype=dtype, ignored=0)
        return case.h.requires_grad_(), case.w.requires_grad_(), case.y

    def ours(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    sizes, of_ours = token_counts(60, 32768), make if vocab > 40 else small
    assert graphs(ours, sizes, of_ours, marked) <= graphs(torch_loss, sizes[:10], small, marked)


def of_some_tokens(loss: Loss) -> Callable[..., Tensor]:
    """Return the loss of the tokens of two masks, whose counts only a run tells."""
    return lambda h, w, y, one, other: loss(h[one], w, y[other])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_token_counts_that_depend_on_data(backend: str, device: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_token_counts_that_depend_on_data(backend, device)


def check_token_counts_that_depend_on_data(backend: str, device: str) -> None:
    case = random_case(12, 8, 40, device=device, ignored=0)
    h, w, y = case.h.requires_grad_(), case.w.requires_grad_(), case.y
    some = torch.arange(12, device=device) % 3 > 0
    ours = of_some_tokens(cutefce.linear_cross_entropy)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    results = []
    for function in (compiled, ours):
        value = function(h, w, y, some, some.clone())
        results.append((value, *torch.autograd.grad(value, (h, w))))
    for got, expected in zip(*results, strict=True):
        assert are_same(got, expected)
    with pytest.raises(RuntimeError):
        compiled(h, w, y, some, ~some)


def test_sizes_that_are_known_to_differ_are_named(device: str) -> None:
    h, y = torch.randn(3, 4, 8, device=device), torch.zeros(3, 5, dtype=torch.long, device=device)
    for x in (h, y):
        torch._dynamo.decorators.mark_unbacked(x, 0)
    w = torch.randn(40, 8, device=device)
    compiled = torch.compile(cutefce.linear_cross_entropy, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"target: got shape .* to match input of shape"):
        compiled(h, w, y)


def test_float_denominators_share_graphs(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    head = cutefce.LinearCrossEntropyLoss(16, 100, device=device)
    compiled = torch.compile(head, fullgraph=True, backend=counter)
    case = random_case(30, 16, 100, device=device)
    for step in range(20):
        given = 1.5 + step / 7
        loss = compiled(case.h, case.y, denominator=given)
        loss.backward()
        assert torch.equal(loss, head(case.h, case.y, denominator=given))
    assert counter.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("workspace", ["min", 300_000, "max"])
def test_compiled_steps_take_the_memory_of_eager_ones(
    workspace: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    h, w, y = (
        torch.randn(256, 64, requires_grad=True),
        torch.randn(5000, 64, requires_grad=True),
        torch.randint(5000, (256,)),
    )

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    forwards: list[Any] = []

    def count(*arguments: Any) -> Any:
        forwards.append(arguments)
        return run_forward(*arguments)

    run_forward = operators.run_forward
    monkeypatch.setattr(operators, "run_forward", count)
    peaks = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="inductor")):

        def step(function: Loss = function) -> None:
            torch.autograd.grad(function(h, w, y), (h, w))

        step()
        forwards.clear()
        peaks.append(peak_bytes(step, "cpu"))
        assert len(forwards) == 1 and not saved._saved
    assert peaks[1] <= peaks[0] + 4096


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strict", rest_slow([False, True]))
@pytest.mark.parametrize("dim", rest_slow(["a range", "automatic"]))
def test_exported_programs_take_any_number_of_tokens(
    dim: str, strict: bool, grad: bool, tmp_path: Path
) -> None:
    head = cutefce.LinearCrossEntropyLoss(8, 20)
    tokens: Any = Dim("tokens", min=1, max=1 << 20) if dim == "a range" else Dim.AUTO
    with torch.set_grad_enabled(grad):
        example = torch.randn(6, 8), torch.randint(20, (6,))
        program = export(head, example, strict=strict, dynamic_shapes=({0: tokens}, {0: tokens}))
        torch.export.save(program, tmp_path / "head.pt2")
        loaded = torch.export.load(tmp_path / "head.pt2").module()
        for count in (1, 2, 19, 4000):
            case = random_case(count, 8, 20, ignored=0)
            h = case.h.requires_grad_(grad)
            loss, expected = loaded(h, case.y), head(h, case.y)
            assert torch.equal(loss, expected)
            if grad:
                (dh,) = torch.autograd.grad(loss, h)
                assert torch.equal(dh, torch.autograd.grad(expected, h)[0])


@pytest.mark.parametrize("dtype", rest_slow(DTYPES))
@pytest.mark.parametrize("grad", [False, True])
def test_decomposed_programs_can_be_trained(grad: bool, dtype: torch.dtype) -> None:
    head = cutefce.LinearCrossEntropyLoss(8, 20, dtype=dtype)
    case = random_case(6, 8, 20, dtype=dtype)
    for own in (head, LogProbs(head)):
        with torch.set_grad_enabled(grad):
            module = export(own, (case.h, case.y)).run_decompositions().module()
        gradients = []
        for function in (module, own):
            h = case.h.clone().requires_grad_()
            gradients.append(torch.autograd.grad(function(h, case.y), h)[0])
        assert torch.equal(*gradients)


class LogProbs(torch.nn.Module):
    """The sum of log-probabilities and entropies of a head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        x = cutefce.linear_log_probs(h, self.head.linear.weight, y, outputs=("entropy",))
        assert x.log_probs is not None and x.entropy is not None
        return x.log_probs.sum() + x.entropy.square().sum()


@pytest.mark.parametrize("workspace", rest_slow(WORKSPACES))
def test_compiled_steps_take_turns_with_eager_ones(workspace: int | str, device: str) -> None:
    """On the kernels, and in one graph."""
    counter = CompileCounterWithBackend("aot_eager")

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    with served_by_kernels(device):
        h, w, y = operands(device)
        for number in range(4):
            given = h, w, y.roll(number)
            first, other, again = (f(*given) for f in (loss, compiled, loss))
            assert have_same_bits(
                *((value, *gradients(value, h, w)) for value in (first, other, again))
            )
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("workspace", ["min", "max", None])
def test_cuda_graphs_of_the_compiler(workspace: str | None, dtype: torch.dtype) -> None:
    """They replay without Python, so that what a forward keeps must not be a part of them."""

    def step(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h * 2, w, y, workspace=workspace) + 1

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    w = torch.randn(3000, 64, device="cuda", dtype=dtype).requires_grad_()
    for _ in range(6):
        case = random_case(
            300, 64, 3000, dtype=dtype, device="cuda", seed=int(torch.randint(9, ()))
        )
        h = case.h.requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        results = []
        for function in (compiled, step):
            loss = function(h, w, case.y)
            gradients = torch.autograd.grad(loss, (h, w))
            results.append([x.clone() for x in (loss, *gradients)])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)
