"""Unsloth, which needs a GPU: its functions' signatures, and their values from all logits.

The stand-in was written against the signatures of unsloth-zoo 2026.10.9.
"""

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cutefce.integrations import unsloth as integration

OWN = "Unsloth's own"
HEADS: dict[str, dict[str, float]] = {
    "plain": {},
    "scaled": {"logit_scale_multiply": 0.7, "logit_scale_divide": 1.3},
    "capped": {"logit_scale_divide": 2.0, "logit_softcapping": 3.0},
}
N, D, V = 13, 16, 61


TRANSFORM = "logit_scale_multiply=0.0, logit_scale_divide=0.0, logit_softcapping=0.0"
PARAMETERS = {
    "fused_linear_cross_entropy": "hidden, weight, bias, targets, *, divisor, scaling=None, "
    f"ignore_index=-100, {TRANSFORM}, label_smoothing=0.0, logits_bias=None, "
    "fp32_head_grad=False, rows_per_chunk=None",
    "fused_linear_logprobs": "hidden, weight, targets, *, bias=None, mask=None, temperature=1.0, "
    f"{TRANSFORM}, return_entropy=False, return_mean_logits=False, return_log_sum_sq_probs=False, "
    "return_is_top1=False, rows_per_chunk=None, entropy_requires_grad=True, "
    "max_rows_per_chunk=None",
    "fused_linear_jsd": "student_hidden, student_weight, teacher_hidden, teacher_weight, *, "
    "mask=None, labels=None, ignore_index=-100, beta=0.5, temperature=1.0, student_bias=None, "
    "teacher_bias=None, student_logit_scale=1.0, student_logit_softcapping=0.0, "
    "teacher_logit_scale=1.0, teacher_logit_softcapping=0.0, num_items_in_batch=None, "
    "scaling=None, rows_per_chunk=None",
}


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module like Unsloth's, with our functions."""
    parts = integration.MODULE.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[integration.MODULE]
    for function, parameters in PARAMETERS.items():
        setattr(module, function, eval(f"lambda {parameters}: OWN", {"OWN": OWN}))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2026.10.9")
    generated: Any = ModuleType("UnslothGKDTrainer")
    generated._unsloth_fused_linear_jsd = module.fused_linear_jsd
    monkeypatch.setitem(sys.modules, generated.__name__, generated)
    integration.enable()
    return module


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return hidden states (N, D), a weight (V, D) and a bias (V,) that require gradients."""
    torch.manual_seed(0)
    shapes = (N, D), (V, D), (V,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def in_float64(leaves: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in leaves]


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: dict[str, float]
) -> Tensor:
    """Return all logits (N, V), as Unsloth defines them."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * head.get("logit_scale_multiply", 1) / head.get("logit_scale_divide", 1)
    cap = head.get("logit_softcapping")
    return logits if cap is None else cap * torch.tanh(logits / cap)


def assert_same(found: Tensor, expected: Tensor, leaves: list[Tensor], exact: list[Tensor]) -> None:
    """Assert that values and the gradients of their weighted sum are the same to 1e-5."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    factors = torch.linspace(0.5, 1, found.numel()).view_as(found)
    ours = torch.autograd.grad((factors * found).sum(), leaves)
    theirs = torch.autograd.grad((factors * expected).sum(), exact)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 * y.abs().max().item())


@pytest.mark.parametrize(
    ("head", "smoothing"), [*((head, 0.0) for head in HEADS), ("plain", 0.1), ("scaled", 0.1)]
)
def test_the_cross_entropy_is_that_of_all_logits(head: str, smoothing: float, unsloth: Any) -> None:
    leaves, constant = operands(), torch.randn(1, V)
    targets = torch.randint(V, (N,)).masked_fill(torch.arange(N) % 4 == 0, -7)
    options: dict[str, Any] = {"ignore_index": -7, "label_smoothing": smoothing}
    loss = unsloth.fused_linear_cross_entropy(
        *leaves, targets, divisor=torch.tensor([5]), logits_bias=constant, **options, **HEADS[head]
    )
    h, w, b = exact = in_float64(leaves)
    logits = logits_of(h, w, b + constant[0].double(), HEADS[head])
    expected = F.cross_entropy(logits, targets, reduction="sum", **options) / 5
    assert loss.dtype == torch.float32
    assert_same(loss, expected, leaves, exact)


def test_a_divisor_of_0_counts_as_1(unsloth: Any) -> None:
    hidden, weight, _ = operands()
    targets = torch.randint(V, (N,))
    loss = unsloth.fused_linear_cross_entropy(hidden, weight, None, targets, divisor=0)
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))
    targets[:] = -100
    assert unsloth.fused_linear_cross_entropy(hidden, weight, None, targets, divisor=0) == 0


@pytest.mark.parametrize("name", ["cross entropy", "jsd"])
def test_a_gradient_of_float16_survives_a_loss_scale(name: str, unsloth: Any) -> None:
    """Without one the gradients are 0 in float16: they are some 1e-8."""
    hidden, weight, _ = (x.detach() for x in operands(torch.float16))
    hidden.requires_grad_()
    divisor, scale = 1e7, 2.0**16
    if name == "jsd":
        teacher = torch.randn(N, D).half(), torch.randn(V, D).half()
        loss = unsloth.fused_linear_jsd(
            hidden, weight, *teacher, num_items_in_batch=divisor, scaling=scale
        )
    else:
        loss = unsloth.fused_linear_cross_entropy(
            hidden, weight, None, torch.arange(N), divisor=divisor, scaling=torch.tensor(scale)
        )
    (scaled,) = torch.autograd.grad(loss * scale, hidden)
    (exact,) = in_float64([hidden])
    log_p = (exact @ weight.double().T).log_softmax(-1)
    expected = -log_p[torch.arange(N), torch.arange(N)].sum()
    if name == "jsd":
        log_q = (teacher[0].double() @ teacher[1].double().T).log_softmax(-1)
        expected = jsd(log_p, log_q, 0.5).sum()
    (gradient,) = torch.autograd.grad(expected * scale / divisor, exact)
    assert 0 < gradient.abs().max() < 1e-1
    assert (scaled.double() - gradient).norm() < 1e-2 * gradient.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("head", HEADS)
def test_log_probabilities_are_those_of_all_logits(
    head: str, temperature: float, unsloth: Any
) -> None:
    leaves = operands()
    targets = torch.randint(V, (1, N))
    targets[0, 3], mask = -1, (torch.arange(N) % 4 != 0)[None]
    is_capped = head == "capped"
    found = unsloth.fused_linear_logprobs(
        leaves[0][None],
        leaves[1],
        targets,
        bias=leaves[2],
        mask=mask,
        temperature=temperature,
        return_entropy=True,
        return_mean_logits=not is_capped,
        return_log_sum_sq_probs=True,
        return_is_top1=True,
        entropy_requires_grad=False if is_capped else None,
        **HEADS[head],
    )
    exact = in_float64(leaves)
    h, w, b = exact
    logits = logits_of(h, w, b, HEADS[head])
    log_p = (logits / temperature).log_softmax(-1)
    counts = mask & (targets >= 0)
    own = log_p.gather(-1, targets.clamp(0)[0, :, None])[:, 0]
    expected = [own, -(log_p.exp() * log_p).sum(-1)]
    expected += [] if is_capped else [logits.mean(-1)]
    expected += [(2 * log_p).exp().sum(-1).log(), log_p.argmax(-1) == targets[0]]
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        y = torch.where(counts[0], y, torch.zeros_like(y))
        torch.testing.assert_close(x[0].to(y.dtype), y, rtol=1e-5, atol=1e-5)
        assert x.shape == targets.shape and x.dtype in (torch.float32, torch.bool)
    differentiable = 1 if is_capped else 2
    assert all(x.requires_grad == (i < differentiable) for i, x in enumerate(found))
    ours, theirs = (
        torch.cat([x.reshape(-1)[counts[0]] for x in values[:differentiable]])
        for values in (found, expected)
    )
    assert_same(ours, theirs, leaves, exact)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of each row of a student's log p from a teacher's log q."""
    if beta in (0, 1):
        a, b = (log_p, log_q) if beta else (log_q, log_p)
        return (a.exp() * (a - b)).sum(-1)
    log_m = (beta * log_q.exp() + (1 - beta) * log_p.exp()).log()
    parts = ((x.exp() * (x - log_m)).sum(-1) for x in (log_q, log_p))
    return beta * next(parts) + (1 - beta) * next(parts)


@pytest.mark.parametrize("items", [None, 4.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_jsd_is_that_of_all_logits(beta: float, items: float | None, unsloth: Any) -> None:
    leaves = operands()
    teacher = [torch.randn(1, N, 24), torch.randn(V, 24), torch.randn(V)]
    labels = torch.arange(N).masked_fill(torch.arange(N) % 4 == 0, -100)[None]
    mask = torch.arange(N)[None] != 5
    loss = unsloth.fused_linear_jsd(
        leaves[0][None],
        leaves[1],
        *teacher[:2],
        mask=mask.int(),
        labels=labels,
        beta=beta,
        temperature=0.8,
        student_bias=leaves[2],
        teacher_bias=teacher[2],
        student_logit_scale=0.7,
        teacher_logit_softcapping=3.0,
        num_items_in_batch=items,
    )
    exact = in_float64(leaves)
    h, w, b = exact
    student = logits_of(h, w, b, {"logit_scale_multiply": 0.7})
    h, w, b = (x.double() for x in teacher)
    other = logits_of(h[0], w, b, {"logit_softcapping": 3.0})
    each = jsd((student / 0.8).log_softmax(-1), (other / 0.8).log_softmax(-1), beta)
    counts = (mask & (labels != -100))[0]
    assert_same(loss, each[counts].sum() / (items or counts.sum()), leaves, exact)


def test_a_weight_of_another_dtype_decides(unsloth: Any) -> None:
    hidden, weight, _ = operands()
    targets = torch.randint(V, (N,))
    found = unsloth.fused_linear_logprobs(hidden.bfloat16(), weight, targets)
    logits = hidden.detach().bfloat16().float() @ weight.T
    torch.testing.assert_close(found, -F.cross_entropy(logits, targets, reduction="none"))


def test_what_is_not_served_is_left_to_unsloth(unsloth: Any) -> None:
    hidden, weight, bias = operands()
    targets = torch.randint(V, (N,))
    losses, log_probs = unsloth.fused_linear_cross_entropy, unsloth.fused_linear_logprobs
    capped: dict[str, Any] = {"logit_softcapping": 3.0}
    entropy: dict[str, Any] = {"return_entropy": True, **capped}

    class Quantized(nn.Parameter):
        """A weight like that of bitsandbytes."""

    partitioned: Any = nn.Parameter(weight.detach().clone())
    partitioned.ds_id = 0
    heads = [
        Quantized(weight.detach()),
        partitioned,
        None,
        weight.double(),
        weight.to(torch.float8_e4m3fn),
        weight.to(torch.uint8),
    ]
    for head in heads:
        assert losses(hidden, head, None, targets, divisor=1) is OWN
        assert log_probs(hidden, head, targets) is OWN
        assert unsloth.fused_linear_jsd(hidden, weight, hidden, head) is OWN
        assert unsloth.fused_linear_jsd(hidden, head, hidden, weight) is OWN
    on_meta = weight.to("meta")
    assert unsloth.fused_linear_jsd(hidden, weight, hidden, on_meta) is OWN
    smoothed = {"label_smoothing": 0.1, **capped}
    assert losses(hidden, weight, bias, targets, divisor=1, **smoothed) is OWN
    assert log_probs(hidden, weight, targets, return_mean_logits=True, **capped) is OWN
    for needed in (True, None):
        assert log_probs(hidden, weight, targets, entropy_requires_grad=needed, **entropy) is OWN
    with torch.no_grad():
        assert log_probs(hidden, weight, targets, **entropy) is not OWN
    assert log_probs(hidden, weight, targets, entropy_requires_grad=False, **entropy) is not OWN


@pytest.mark.skipif(find_spec("unsloth_zoo") is not None, reason="Unsloth is installed")
def test_a_missing_unsloth_is_named() -> None:
    message = r"^unsloth_zoo: not installed, expected unsloth-zoo 2026\.10\.9$"
    with pytest.raises(ImportError, match=message):
        integration.enable()


def test_errors_are_not_hidden(unsloth: Any) -> None:
    hidden, weight, _ = operands()
    with pytest.raises(IndexError):
        unsloth.fused_linear_cross_entropy(hidden, weight, None, torch.full((N,), V), divisor=1)


def test_a_compiled_step_is_one_graph(unsloth: Any) -> None:
    leaves, targets = operands(), torch.randint(V, (N,))

    def step(*given: Tensor) -> Tensor:
        own = unsloth.fused_linear_logprobs(given[0], given[1], targets, bias=given[2])
        loss = unsloth.fused_linear_cross_entropy(*given, targets, divisor=targets.sum())
        return torch.add(loss, own.mean())

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, step(*leaves))


def test_trainers_generated_before_get_our_functions(unsloth: Any) -> None:
    generated: Any = sys.modules["UnslothGKDTrainer"]
    for found in (unsloth.fused_linear_jsd, generated._unsloth_fused_linear_jsd):
        assert vars(found)["__wrapped__"] is integration.fused_linear_jsd
