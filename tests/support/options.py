"""What calls with options are compared with: every formula from all logits, in any dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cutefce
from tests.support.once import once
from tests.support.reference import Case, are_same, assert_errors, distance, random_case

OPTIONS: dict[str, dict[str, Any]] = {
    "linear_bias": {"linear_bias": torch.randn},
    "weight": {"weight": torch.rand},
    "label_smoothing": {"label_smoothing": 0.1},
    "token_weights": {"token_weights": torch.randn},
    "z_loss": {"z_loss": 1e-2},
    "logit_scale": {"logit_scale": 0.3},
    "negative logit_scale": {"logit_scale": -1.7},
    "softcap": {"softcap": 2.5},
    "temperature": {"temperature": 0.7},
    "temperature ()": {"temperature": torch.tensor(1.3)},
    "temperature (N,)": {"temperature": torch.rand},
}
"""Each option alone; a function draws the values of a tensor."""

PER_TOKEN = "weight", "token_weights", "z_loss", "temperature (N,)"
"""Those whose factors differ between tokens, so that no gradients are formed in the forward."""

REFUSED_PAIR = {"label_smoothing", "softcap"}

ALL = [
    name
    for name in OPTIONS
    if name not in ("negative logit_scale", "temperature", "temperature ()")
]
TOGETHER = {
    "smoothing and all factors": [name for name in ALL if name != "softcap"],
    "softcap and all factors": [name for name in ALL if name != "label_smoothing"],
}
"""Options of calls that have all but one of the pair."""


def _drawn(name: str, draw: Any, tokens: int, vocab: int) -> Tensor:
    """Return the values of a tensor option; a fifth of the tokens has the weight 0."""
    x: Tensor = draw(vocab if name in ("linear_bias", "weight") else tokens)
    if name == "token_weights":
        return torch.where(torch.rand(tokens) < 0.2, 0, x)
    return x if name == "linear_bias" else x + 0.3


@dataclass(frozen=True)
class OptionsCase:
    """Inputs of a call with options."""

    case: Case
    options: dict[str, Any]
    """Arguments of `linear_cross_entropy`, by name."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """h, w and, if there is one, the bias, which require gradients."""
        bias = self.options.get("linear_bias")
        tensors = self.case.h, self.case.w, *([] if bias is None else [bias])
        return (*(x.detach().requires_grad_() for x in tensors),)

    def with_leaves(self, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the options, the bias being that of `leaves`."""
        return self.options | ({"linear_bias": leaves[2]} if len(leaves) > 2 else {})

    def logits(self, leaves: tuple[Tensor, ...]) -> Tensor:
        """Return the logits (N, V) of these h, w and bias, in their dtype."""
        return model_logits(leaves[0] @ leaves[1].t(), **self.with_leaves(leaves))

    @property
    def ignored(self) -> Tensor:
        """Which tokens (N,) reach nothing, whatever they hold."""
        off: Tensor = torch.zeros_like(self.case.y, dtype=torch.bool)
        if "token_weights" in self.options:
            off = self.options["token_weights"] == 0
        if "target_probs" in self.options:
            off = off | (self.options["target_probs"] == 0).all(1)
            return off
        return off if "target" in self.options else off | (self.case.y == -100)

    def loss(self, leaves: tuple[Tensor, ...], **more: Any) -> Tensor:
        """Return the loss of cutefce for these h, w and bias."""
        options: dict[str, Any] = {"target": self.case.y} | self.with_leaves(leaves) | more
        if "target_indices" in options:
            del options["target"]
        loss: Tensor = cutefce.linear_cross_entropy(leaves[0], leaves[1], **options)
        return loss

    def ours(
        self, *, trained: Sequence[bool] = (), backwards: int = 1, **more: Any
    ) -> tuple[Tensor, ...]:
        """Return losses and gradients of cutefce, by default with reduction "none".

        Gradients are those of the `trained` leaves, by default of all; `backwards` of one graph
        have the same bits.
        """
        leaves = self.leaves
        for leaf, on in zip(leaves, trained, strict=False):
            leaf.requires_grad_(on)
        reduction = self.options.get("reduction", "none")
        loss = self.loss(leaves, **{"reduction": reduction} | more)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        upstream = self.case.upstream.to(loss.dtype) if loss.ndim else None
        first, *others = (
            torch.autograd.grad(loss, wanted, upstream, retain_graph=number < backwards)
            for number in range(1, backwards + 1)
        )
        assert all(all(map(are_same, first, other)) for other in others)
        return loss.detach(), *first


def options_case(names: list[str], *sizes: int, **more: Any) -> OptionsCase:
    """Draw a case of tokens, hidden, vocab with the options of these `names` of `OPTIONS`."""
    case, (tokens, _, vocab), given = random_case(*sizes, **more), sizes, {}
    for name, value in (pair for key in names for pair in OPTIONS[key].items()):
        if callable(value):
            value = _drawn(name, value, tokens, vocab).to(case.h.device)
        elif isinstance(value, Tensor):
            value = value.to(case.h.device)
        if name == "linear_bias":
            value = value.to(case.h.dtype)
        given[name] = value
    return OptionsCase(case, given)


def soft_case(names: list[str], classes: int, *sizes: int, **more: Any) -> OptionsCase:
    """Draw a case of `options_case` with K `classes` of each token as soft targets.

    A few occur twice; a fifth has probability 0 and the index -100, all of a tenth of the tokens.
    """
    x, (tokens, _, vocab) = options_case(names, *sizes, **more), sizes
    index = torch.randint(vocab, (tokens, classes))
    index[:, classes // 2] = index[:, 0]
    probs = torch.randn(tokens, classes).mul(2).softmax(1) * (0.5 + torch.rand(tokens, 1))
    probs[torch.rand(tokens, classes) < 0.2] = 0
    probs[torch.rand(tokens) < 0.1] = 0
    index[probs == 0] = -100
    device, dtype = x.case.h.device, torch.promote_types(x.case.h.dtype, torch.float32)
    soft = {"target_indices": index.to(device), "target_probs": probs.to(device, dtype)}
    return OptionsCase(x.case, x.options | soft)


def dense_case(names: list[str], *sizes: int, **more: Any) -> OptionsCase:
    """Draw a case of `options_case` with probabilities of all classes as the target.

    They do not add up to 1; half of a token's are 0, and all of a tenth of the tokens.
    """
    x, (tokens, _, vocab) = options_case(names, *sizes, **more), sizes
    probs = torch.randn(tokens, vocab).mul(2).softmax(1) * (0.5 + torch.rand(tokens, 1))
    probs[torch.rand(tokens, vocab) < 0.5] = 0
    probs[torch.rand(tokens) < 0.1] = 0
    dtype = torch.promote_types(x.case.h.dtype, torch.float32)
    return OptionsCase(x.case, x.options | {"target": probs.to(x.case.h.device, dtype)})


def _soft(names: list[str], *sizes: int, **more: Any) -> OptionsCase:
    return soft_case(names, 7, *sizes, **more)


TARGETS: dict[str, Callable[..., OptionsCase]] = {
    "class indices": options_case,
    "soft targets": _soft,
    "probabilities": dense_case,
}
"""What draws a case of options and sizes, by its kind of target."""

LOSSES: dict[str, Callable[..., OptionsCase]] = {"plain": partial(options_case, [])}
"""What draws a case of sizes: each option alone, all of them, and each kind of target."""
LOSSES |= {name: partial(options_case, [name]) for name in OPTIONS}
LOSSES |= {
    f"{kind}, {name}": partial(make, names)
    for kind, make in TARGETS.items()
    for name, names in {"alone": list[str](), **TOGETHER}.items()
    if kind != "class indices" or names
}
LOSSES["one soft target"] = lambda *sizes, **more: soft_case([], 1, *sizes, **more)


def model_logits(
    t: Tensor,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: Tensor | float = 1.0,
    **_: Any,
) -> Tensor:
    """Return the logits (N, V), in t's dtype, of products t of hidden states and weight."""
    u = t * logit_scale
    if linear_bias is not None:
        u = u + linear_bias.to(t.dtype)
    if softcap is not None:
        u = softcap * torch.tanh(u / softcap)
    divisor = torch.as_tensor(temperature, dtype=t.dtype, device=t.device)
    return u / (divisor[:, None] if divisor.ndim else divisor)


def losses_of_logits(
    u: Tensor,
    y: Tensor,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    token_weights: Tensor | None = None,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "none",
    denominator: Tensor | float | None = None,
    target_indices: Tensor | None = None,
    target_probs: Tensor | None = None,
    target: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of logits u (N, V), in their dtype; y is not used with soft targets.

    A `target` is probabilities (N, V).
    """
    active, (tokens, vocab) = y != ignore_index, u.shape
    token = u.new_ones(tokens) if token_weights is None else token_weights.to(u.dtype)
    kappa, log_p = u.new_ones(vocab) if weight is None else weight.to(u.dtype), u.log_softmax(1)
    if target is not None:
        active, count = token != 0, token
        terms = token[:, None] * kappa * target.to(u.dtype) * log_p
        losses = -(1 - label_smoothing) * torch.where(target == 0, 0, terms).sum(1)
    elif target_indices is not None and target_probs is not None:
        active, count = (target_probs != 0).any(1) & (token != 0), token
        index = torch.where(target_probs != 0, target_indices, 0)
        factors = token[:, None] * kappa[index] * target_probs.to(u.dtype)
        losses = -(1 - label_smoothing) * (factors * log_p.gather(1, index)).sum(1)
    else:
        active = active & (token != 0)
        index = torch.where(active, y, 0)
        count = token * kappa[index]
        losses = -(1 - label_smoothing) * count * log_p.gather(1, index[:, None])[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing / vocab * token * (log_p * kappa).sum(1)
    if z_loss:
        losses = losses + count * z_loss * u.logsumexp(1).square()
    losses = torch.where(active, losses, 0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    divisor = torch.where(active, count, 0).sum() if denominator is None else denominator
    divisor = torch.as_tensor(divisor, dtype=u.dtype, device=u.device).reshape(())
    return torch.where(divisor == 0, 0, losses.sum() / divisor)


def exact(x: OptionsCase, **more: Any) -> tuple[Tensor, ...]:
    """Return losses and gradients in float64, by default with reduction "none"."""
    leaves = (*(leaf.detach().double().requires_grad_() for leaf in x.leaves),)
    options = x.with_leaves(leaves) | more
    loss = losses_of_logits(x.logits(leaves), x.case.y, **options)
    upstream = x.case.upstream.double() if loss.ndim else None
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream)


def unfused(x: OptionsCase, *, rounded: bool, **more: Any) -> tuple[Tensor, ...]:
    """Return losses and gradients of a GEMM, the options in float32 or wider, and two GEMMs.

    Products of the forward are `rounded` to the inputs' dtype or are float32; their gradients are
    rounded to the inputs' dtype.
    """
    options, t = x.options | more, products(x, rounded)
    loss = losses_of_logits(model_logits(t, **options), x.case.y, **options)
    (dt,) = torch.autograd.grad(loss, t, x.case.upstream.to(t.dtype) if loss.ndim else None)
    return loss.detach(), *gradients_of_products(x, dt, rounded)


def products(x: OptionsCase, rounded: bool) -> Tensor:
    """Return products of hidden states and weight, which require gradients."""
    h, w = x.case.h, x.case.w
    wide = torch.promote_types(h.dtype, torch.float32)
    t = (h @ w.t()).to(wide) if rounded else h.to(wide) @ w.to(wide).t()
    return t.requires_grad_()


def gradients_of_products(x: OptionsCase, dt: Tensor, rounded: bool) -> tuple[Tensor, ...]:
    """Return gradients of h, w and the bias, of those of products, which are rounded."""
    h, w, dtype, wide = x.case.h, x.case.w, x.case.h.dtype, dt.dtype
    dt = dt.to(dtype)
    if rounded:
        dx, dw = dt @ w, dt.t() @ h
    else:
        dx, dw = (dt.to(wide) @ w.to(wide)).to(dtype), (dt.to(wide).t() @ h.to(wide)).to(dtype)
    bias = x.options.get("linear_bias")
    if bias is None:
        return dx, dw
    dbias = dt.to(wide).sum(0) / x.options.get("logit_scale", 1.0)
    return dx, dw, dbias.to(bias.dtype)


def assert_results_as_accurate(
    got: tuple[Tensor, ...], x: OptionsCase, *, saturated: bool = False, **more: Any
) -> None:
    """Assert the bounds of `reference.assert_as_accurate` for losses and gradients with options.

    `more` are a reduction and its denominator.  float64 results are allowed 64 units roundoff, and
    a reduced loss as many of its terms.  docs/numerics.md has the larger factors.
    """
    truth, others, wides = _references(x, more)
    names = ["loss", "dx", "dw", "dbias"][: len(truth)]
    if got[0].ndim == 0:
        losses, eps = exact(x)[0], torch.finfo(got[0].dtype).eps
        terms = float(losses.abs().sum() * (truth[0] / losses.sum()).abs().nan_to_num(1.0))
        assert float((got[0].double() - truth[0]).abs()) <= 64 * eps * (1 + terms), "loss"
    every = zip(names, got, truth, others, wides, strict=True)
    rows = [row for row in every if row[1].ndim]
    factors = {}
    if x.case.h.dtype.itemsize == 2 and "target_indices" in x.options:
        factors = {"dw": 1.5**0.5}  # three roundings, not two, of classes that are no targets
    if x.case.h.dtype == torch.float32 and "softcap" in x.options:
        factors = dict.fromkeys(names[1:], 4.0)  # the derivative is of a rounded logit
    if x.case.h.dtype != torch.float64:
        assert_errors(rows, x.case.h.dtype, saturated, factors)
        return
    for name, result, want, *_ in rows:
        limit = 64 * torch.finfo(torch.float64).eps * (1 + float(want.norm()))
        assert distance(result, want) <= limit, name


@once
def _references(x: OptionsCase, more: dict[str, Any]) -> tuple[tuple[Tensor, ...], ...]:
    """Return float64 results, and those of `unfused`, rounded and not; of float64 no others."""
    truth = exact(x, **more)
    if x.case.h.dtype == torch.float64:
        return truth, truth, truth
    return truth, unfused(x, rounded=True, **more), unfused(x, rounded=False, **more)
