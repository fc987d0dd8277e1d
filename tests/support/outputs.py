"""Log-probabilities and outputs of tokens, of cutefce and from all logits in any dtype."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cutefce
from tests.support.options import (
    OptionsCase,
    gradients_of_products,
    model_logits,
    options_case,
    products,
)
from tests.support.reference import are_same, distance

OUTPUTS = "lse", "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax", "rank"
DIFFERENTIABLE = "log_probs", "lse", "entropy"
FLOOR, KEPT = "logit_floor", "kept_classes"
UPSTREAMS = "random", "of sum 0", "of one class", "0"
"""Kinds of upstream gradients of the log-probabilities of a token."""


class RowValues(NamedTuple):
    """Log-probabilities and outputs of all tokens, with the fields of `LogProbs`."""

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor
    sum_p_squared: Tensor
    mean_logit: Tensor
    is_top1: Tensor
    argmax: Tensor
    rank: Tensor


def kept_logits(
    u: Tensor,
    index: Tensor,
    logit_floor: Tensor | None = None,
    kept_classes: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return logits (N, V) of targets and of what is kept: others are -inf.

    That are those not below floors (N,), or kept classes (N, K).
    """
    if logit_floor is None and kept_classes is None:
        return u
    if kept_classes is not None:
        is_kept = torch.zeros(len(u), u.shape[1] + 1, dtype=torch.bool, device=u.device)
        is_kept = is_kept.scatter(1, kept_classes % (u.shape[1] + 1), True)[:, :-1]
        is_kept |= (index == -100)[:, None]
    else:
        assert logit_floor is not None
        is_kept = u >= logit_floor[:, None]
    is_target = index[:, None] == torch.arange(u.shape[1], device=u.device)
    return u.masked_fill(~(is_kept | is_target), -torch.inf)


def row_values(u: Tensor, index: Tensor, **options: Any) -> RowValues:
    """Return the outputs of logits u (N, V) and classes (N,) or (N, K); 0 for ignored tokens.

    Of `options` it takes those that leave out classes.
    """
    u = kept_logits(u, index, **options)
    counts = index != -100
    active = counts if index.ndim == 1 else counts.any(1)
    chosen = torch.where(counts, index, 0).view(len(index), -1)
    log_p = u.log_softmax(1)
    p, largest = log_p.exp(), u.argmax(1)
    own = u.gather(1, chosen)
    is_top1 = own[:, 0] >= u.amax(1)
    if index.ndim == 1:
        largest = torch.where(is_top1, chosen[:, 0], largest)
    values = (
        u.logsumexp(1),
        -(p * log_p.masked_fill(p == 0, 0)).sum(1),
        p.square().sum(1),
        u.mean(1),
        is_top1,
        largest,
        (u > own[:, :1]).sum(1),
    )
    log_probs = torch.where(counts, log_p.gather(1, chosen).view_as(index), 0)
    return RowValues(log_probs, *(torch.where(active, x, torch.zeros_like(x)) for x in values))


Results = tuple[Any, tuple[Tensor, ...]]
"""Values with the fields of `LogProbs`, and gradients of h, w and the bias."""


@dataclass(frozen=True)
class ValuesCase:
    """Inputs of a call, what it asks for, and upstream gradients."""

    own: OptionsCase
    index: Tensor
    """The class (N,) of each token, or K classes (N, K); class 0 in calls without a target."""
    outputs: tuple[str, ...]
    upstream: dict[str, Tensor]
    """Those of results by name: log_probs, of the index's shape, lse (N,), entropy (N,)."""

    @property
    def ignored(self) -> Tensor:
        """Which tokens (N,) have no class."""
        none = self.index == -100
        return none if none.ndim == 1 else none.all(1)

    def values(self, leaves: Sequence[Tensor], **more: Any) -> Any:
        """Return what a call of cutefce returns."""
        name = "target" if self.index.ndim == 1 else "target_indices"
        given = {name: self.index, "outputs": self.outputs, **self.own.with_leaves((*leaves,))}
        if "log_probs" not in self.upstream:
            del given[name]
        return cutefce.linear_log_probs(leaves[0], leaves[1], **given, **more)

    def ours(self, **more: Any) -> Results:
        """Return values and gradients of cutefce; a second backward has equal bits."""
        leaves = self.own.leaves
        found = self.values(leaves, **more)
        tensors = [getattr(found, name) for name in self.upstream]
        given = [up.to(x.dtype) for up, x in zip(self.upstream.values(), tensors, strict=True)]
        gradients = torch.autograd.grad(tensors, leaves, given, retain_graph=True)
        # other gradients in between leave nothing behind
        torch.autograd.grad(tensors, leaves, [torch.zeros_like(up) for up in given], True)
        again = torch.autograd.grad(tensors, leaves, given)
        # on the portable path of a GPU, the forward may run on kernels that were compiled since
        assert all(map(are_same, gradients, again))
        return found, gradients

    def total(self, values: Any) -> Tensor:
        """Return what is differentiated."""
        pairs = ((getattr(values, name), up) for name, up in self.upstream.items())
        total = sum((x * up.to(x.dtype)).sum() for x, up in pairs)
        assert isinstance(total, Tensor)
        return total

    def exact(self) -> Results:
        """Return values and gradients in float64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.own.leaves]
        values = row_values(self.own.logits((*leaves,)), self.index, **self.own.options)
        return values, torch.autograd.grad(self.total(values), leaves)

    def unfused(self, *, rounded: bool) -> Results:
        """Return them with float32 or wider values, and products' gradients of the inputs' dtype.

        Products of the forward are `rounded` to the inputs' dtype, or are float32.
        """
        t = products(self.own, rounded)
        values = row_values(model_logits(t, **self.own.options), self.index, **self.own.options)
        (dt,) = torch.autograd.grad(self.total(values), t)
        return values, gradients_of_products(self.own, dt, rounded)

    def check(self, got: Results) -> None:
        """Assert that errors are those of the unfused form, or a few roundings of its values."""
        forms = got, self.exact(), self.unfused(rounded=True), self.unfused(rounded=False)
        asked = ("log_probs",) * ("log_probs" in self.upstream) + self.outputs
        names = [name for name in asked if name not in OUTPUTS[4:]]
        rows = [(name, *(getattr(x, name).detach() for x, _ in forms)) for name in names]
        # log p is a difference of logits of this size, a rounding of which is not relative
        case = self.own.case
        u = model_logits(case.h.double() @ case.w.double().t(), **self.own.options)
        size = float(u.abs().max()) if u.numel() else 0.0
        narrow = case.h.dtype.itemsize == 2
        for name, result, want, other, _ in rows:
            error, norm = distance(result, want), float(want.norm())
            if self.own.case.h.dtype == torch.float64:
                allowed = 64 * torch.finfo(torch.float64).eps * (1 + size + norm)
            else:
                allowed = (1.05 if narrow else 2) * distance(other, want)
                allowed += 4 * torch.finfo(torch.float32).eps * (1 + norm)
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        of_exps = [0.0] * 3
        if narrow and ("entropy" in self.upstream or "log_probs" not in self.upstream):
            of_exps = self._errors_of_exponentials()
        every = zip(("dx", "dw", "dbias"), of_exps, *(x for _, x in forms), strict=False)
        for name, of_exp, *results in every:
            error, allowed = distance(results[0], results[1]), self._allowed(name, size, *results)
            allowed = math.hypot(allowed, of_exp)
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        self._check_largest(got[0], u)

    def _allowed(
        self, name: str, size: float, got: Tensor, want: Tensor, other: Tensor, wide: Tensor
    ) -> float:
        """Return the error that a gradient may have."""
        several = self.index.ndim == 2 or KEPT in self.own.options
        has_target = "log_probs" in self.upstream
        entropy = "entropy" in self.upstream
        dtype = self.own.case.h.dtype
        eps, norm, narrow = torch.finfo(dtype).eps, float(want.norm()), dtype.itemsize == 2
        cancels = size if several or entropy else 0.0
        if dtype == torch.float64:
            return 64 * eps * (1 + cancels + norm)
        allowed = (1.05 if narrow else 2) * distance(other, want)
        if not narrow:
            return allowed + 4 * eps * (norm if several else 1 + norm) + cancels * eps / 2 * norm
        if several and name != "dx" and (dtype == torch.bfloat16 or entropy):
            # parts of other classes, if stored, are rounded three times, not twice
            allowed = 1.5**0.5 * distance(other, want)
        if not has_target and name == "dw":
            # no target's part, which has one rounding: exponentials and hidden states have one each
            allowed = 2**0.5 * distance(other, want)
        if several and name == "dbias":  # few roundings, which need not be average ones
            return allowed + distance(want.to(dtype), want)
        if several and not entropy:
            return min(allowed, 1.35 * distance(wide, want))
        return allowed

    def _errors_of_exponentials(self) -> list[float]:
        """Return errors of gradients from p times a multiple of log p, p and product rounded.

        They are those of numbers a little above powers of 2, which are the largest.
        """
        case, index = self.own.case, self.index.view(len(self.index), -1)
        t = products(self.own, False).double().detach().requires_grad_()
        u = kept_logits(model_logits(t, **self.own.options), self.index, **self.own.options)
        (du,) = torch.autograd.grad(self.total(row_values(u, self.index)), u, retain_graph=True)
        p = u.detach().softmax(1)
        # classes of the index have a part of their own, which is not made of their exponential
        du = du.scatter(1, index.clamp(0), 0.0)
        of_p, of_product = (torch.rand(2, *u.shape).to(u) - 0.5) * torch.finfo(case.h.dtype).eps
        of_entropy = self.upstream.get("entropy", u.new_zeros(len(u)))
        by_p = du - of_entropy[:, None] * p
        (dt,) = torch.autograd.grad(u, t, by_p * of_p + du * of_product, retain_graph=True)
        of_bias = dt.sum(0)
        if "log_probs" not in self.upstream:
            # without parts of targets a class may have one large exponential, rounded by the most
            eps = torch.finfo(case.h.dtype).eps
            (most,) = torch.autograd.grad(u, t, (by_p.abs() + du.abs()) * eps / 2)
            of_bias = torch.maximum(of_bias.abs(), most.abs().amax(0))
        of_bias = of_bias / self.own.options.get("logit_scale", 1.0)
        gradients = dt @ case.w.double(), dt.t() @ case.h.double(), of_bias
        return [float(x.norm()) for x in gradients]

    def _check_largest(self, values: Any, u: Tensor) -> None:
        """Assert that the class of the largest logit is right where float32 logits can tell."""
        active = ~self.ignored
        wide = torch.promote_types(self.own.case.h.dtype, torch.float32)
        margin = 64 * torch.finfo(wide).eps * float(u.abs().max()) if u.numel() else 0.0
        u = kept_logits(u, self.index, **self.own.options)
        largest = u.amax(1)
        if "argmax" in self.outputs:
            found = u.gather(1, values.argmax[:, None])[:, 0]
            assert values.argmax.dtype == torch.long
            assert bool((found >= largest - margin)[active].all())
            assert not values.argmax[~active].any()
        if "is_top1" in self.outputs:
            index = torch.where(active, self.index, 0)
            own = u.gather(1, index[:, None])[:, 0]
            assert values.is_top1.dtype == torch.bool
            second = u.scatter(1, index[:, None], -torch.inf).amax(1)
            clear = active & ((own - second).abs() > margin)
            assert torch.equal(values.is_top1[clear], (own >= largest)[clear])
            assert not values.is_top1[~active].any()
            if "argmax" in self.outputs:
                assert torch.equal(values.is_top1, (values.argmax == self.index) & active)
        if "rank" in self.outputs:
            index = torch.where(active, self.index, 0)
            own = u.gather(1, index[:, None])
            equal = ((u - own).abs() <= margin).sum(1) - 1  # but for the target
            want = torch.where(active, (u > own).sum(1), 0)
            assert values.rank.dtype == torch.long
            assert bool(((values.rank - want).abs() <= equal)[active].all())
            assert not values.rank[~active].any()
            if "is_top1" in self.outputs:
                assert torch.equal(values.is_top1, (values.rank == 0) & active)


def floors(u: Tensor) -> Tensor:
    """Return floors (N,) of logits u (N, V) that are far from all of them, and some infinite ones.

    They are in the largest gap of a token's logits: no rounding decides which classes are left.
    """
    top = u.sort(1, descending=True).values
    gaps = top[:, :-1] - top[:, 1:]
    if not gaps.numel():
        return torch.full_like(u[:, 0], -torch.inf)
    largest = gaps.argmax(1, keepdim=True)
    result = (top.gather(1, largest) + top.gather(1, largest + 1))[:, 0] / 2
    result[::7], result[3::7] = -torch.inf, torch.inf
    return result


def kept_of(u: Tensor, index: Tensor) -> Tensor:
    """Return up to 9 classes (N, 9) of logits u (N, V), of every other token with the target."""
    kept = torch.randint(u.shape[1], (len(u), 9)).to(u.device)
    kept[:, 4] = kept[:, 0]  # twice
    kept[::2, 7] = torch.where(index < 0, -1, index)[::2]
    kept[1::3, 2:] = -1
    kept[2::7] = -1
    return kept


def values_case(
    names: list[str],
    classes: int | None,
    *sizes: int,
    kind: str = "random",
    outputs: tuple[str, ...] = (),
    **more: Any,
) -> ValuesCase:
    """Draw a case of `options_case` with a class, or K `classes`, of each token; none if 0.

    Upstream gradients are of a `kind` of `UPSTREAMS`.  What a call refuses is left out of the
    `outputs`.  Half of the single classes have the largest logit.  Of several a few occur twice; a
    fifth are ignored, all of a tenth of the tokens.
    """
    drawn = [name for name in names if name not in (FLOOR, KEPT)]
    x, (tokens, _, vocab) = options_case(drawn, *sizes, **more), sizes
    refused = set() if classes is None else {"is_top1", "rank"}
    refused |= {"mean_logit"} if "softcap" in x.options else set()
    device, index = x.case.h.device, x.case.y
    if classes is None and tokens:
        u = model_logits(x.case.h.double() @ x.case.w.double().t(), **x.options)
        if FLOOR in names:
            x.options[FLOOR] = floors(u).to(torch.promote_types(x.case.h.dtype, torch.float32))
            refused.add("mean_logit")
        if KEPT in names:
            x.options[KEPT] = kept_of(u, index)
            refused.add("mean_logit")
        index[::2] = torch.where(index[::2] == -100, -100, u.argmax(1)[::2])
    elif classes:
        index = torch.randint(vocab, (tokens, classes))
        if classes > 2:
            index[:, classes // 2], index[:, -1] = index[:, 0], index[:, 1]
        index[torch.rand(tokens, classes) < 0.2] = -100
        index[torch.rand(tokens) < 0.1] = -100
        index = index.to(device)
    elif classes == 0:
        index = torch.zeros_like(index)
    outputs = (*(name for name in outputs if name not in refused),)
    counts = (index != -100).cpu()
    values = torch.randn(index.shape, dtype=torch.float64) * counts
    if kind == "0":
        values[::2] = 0
    elif classes and kind == "of sum 0":
        values = values - values.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(1)
        values = values * counts
    elif classes and kind == "of one class":
        values[:, 1:] *= 1e-6
        values[::2] = values[::2].flip(1)
    upstream = {} if classes == 0 else {"log_probs": values}
    if classes == 0 and "lse" not in outputs:  # what is differentiated
        outputs = ("lse", *outputs)
    for name in outputs:
        if name in DIFFERENTIABLE and not (name == "entropy" and "softcap" in x.options):
            upstream[name] = torch.randn(tokens, dtype=torch.float64)
    return ValuesCase(x, index, outputs, {name: up.to(device) for name, up in upstream.items()})
