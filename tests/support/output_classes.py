"""Log-probabilities of K classes a token, of cutefce and from all logits in any dtype."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cutefce
from tests.support.options import OptionsCase, model_logits, options_case

UPSTREAMS = "random", "of sum 0", "of one class", "0"
"""Kinds of upstream gradients of the log-probabilities of a token."""


@dataclass(frozen=True)
class ClassesCase:
    """Inputs of a call with the classes (N, K) of each token, and upstream gradients."""

    own: OptionsCase
    index: Tensor
    upstream: dict[str, Tensor]
    """Those of results by name: log_probs (N, K), lse (N,), entropy (N,)."""

    @property
    def outputs(self) -> list[str]:
        """What is asked for beside log-probabilities."""
        return [name for name in self.upstream if name != "log_probs"]

    def ours(self, **more: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return values and gradients of cutefce; a second backward has equal bits."""
        leaves = self.own.leaves
        found = cutefce.linear_log_probs(
            leaves[0],
            leaves[1],
            target_indices=self.index,
            outputs=self.outputs,
            **self.own.with_leaves(leaves),
            **more,
        )
        values = [getattr(found, name) for name in self.upstream]
        given = [up.to(x.dtype) for up, x in zip(self.upstream.values(), values, strict=True)]
        gradients = torch.autograd.grad(values, leaves, given, retain_graph=True)
        # other gradients in between leave nothing behind
        torch.autograd.grad(values, leaves, [torch.zeros_like(up) for up in given], True)
        again = torch.autograd.grad(values, leaves, given)
        if self.own.case.h.device.type == "cpu":
            assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
        return [x.detach() for x in values], [*gradients]

    def of_logits(self, u: Tensor) -> list[Tensor]:
        """Return the values of logits u (N, V), in their dtype."""
        log_p, counts = u.log_softmax(1), self.index != -100
        active = counts.any(1)
        own = log_p.gather(1, torch.where(counts, self.index, 0))
        lse, entropy = u.logsumexp(1), -(log_p.exp() * log_p).sum(1)
        found = {
            "log_probs": torch.where(counts, own, 0),
            "lse": torch.where(active, lse, 0),
            "entropy": torch.where(active, entropy, 0),
        }
        return [found[name] for name in self.upstream]

    def total(self, values: list[Tensor]) -> Tensor:
        """Return what is differentiated."""
        pairs = zip(values, self.upstream.values(), strict=True)
        total = sum((x * up.to(x.dtype)).sum() for x, up in pairs)
        assert isinstance(total, Tensor)
        return total

    def exact(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return values and gradients in float64."""
        leaves = [leaf.detach().double().requires_grad_() for leaf in self.own.leaves]
        options = self.own.with_leaves((*leaves,))
        values = self.of_logits(model_logits(leaves[0] @ leaves[1].t(), **options))
        gradients = torch.autograd.grad(self.total(values), leaves)
        return [x.detach() for x in values], [*gradients]

    def unfused(self, *, rounded: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return them with float32 or wider values, and products' gradients of the inputs' dtype.

        Products of the forward are `rounded` to the inputs' dtype, or are float32.
        """
        h, w, options = self.own.case.h, self.own.case.w, self.own.options
        wide = torch.promote_types(h.dtype, torch.float32)
        t = (h @ w.t()).to(wide) if rounded else h.to(wide) @ w.to(wide).t()
        t.requires_grad_()
        values = self.of_logits(model_logits(t, **options))
        (dt,) = torch.autograd.grad(self.total(values), t)
        dt = dt.to(h.dtype)
        if rounded:
            gradients = [dt @ w, dt.t() @ h]
        else:
            both = dt.to(wide) @ w.to(wide), dt.to(wide).t() @ h.to(wide)
            gradients = [x.to(h.dtype) for x in both]
        bias = options.get("linear_bias")
        if bias is not None:
            sums = dt.to(wide).sum(0) / options.get("logit_scale", 1.0)
            gradients.append(sums.to(bias.dtype))
        return [x.detach() for x in values], gradients

    def check(self, found: tuple[list[Tensor], list[Tensor]]) -> None:
        """Assert that errors are those of the unfused form, or a few roundings of its values."""
        dtype = self.own.case.h.dtype
        narrow, eps = dtype.itemsize == 2, torch.finfo(dtype).eps
        names = [*self.upstream, "dx", "dw", "dbias"]
        forms = found, self.exact(), self.unfused(rounded=True), self.unfused(rounded=False)
        results = [[*values, *gradients] for values, gradients in forms]
        # log p is a difference of logits of this size, a rounding of which is not relative
        h, w = self.own.case.h.double(), self.own.case.w.double()
        u = model_logits(h @ w.t(), **self.own.options)
        size = float(u.abs().max()) if u.numel() else 0.0
        for name, got, want, other, wide in zip(names, *results, strict=False):
            error, norm = _distance(got, want), float(want.norm())
            if dtype == torch.float64:
                allowed = 64 * eps * (1 + size + norm)
            else:
                allowed = (1.05 if narrow else 2) * _distance(other, want)
                if name in self.upstream:
                    allowed += 4 * torch.finfo(torch.float32).eps * (1 + norm)
                elif narrow and name == "dbias":  # few roundings, which need not be average ones
                    allowed += _distance(want.to(dtype), want)
                elif narrow and "entropy" not in self.upstream:
                    if name == "dw" and dtype == torch.bfloat16:
                        # parts of other classes, if stored, are rounded three times, not twice
                        allowed = 1.5**0.5 * _distance(other, want)
                    allowed = min(allowed, 1.35 * _distance(wide, want))
                elif not narrow:
                    allowed += (4 + size / 2) * eps * norm
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def classes_case(
    names: list[str],
    classes: int,
    *sizes: int,
    kind: str = "random",
    outputs: tuple[str, ...] = (),
    **more: Any,
) -> ClassesCase:
    """Draw a case of `options_case` with K `classes` of each token and `kind` of `UPSTREAMS`.

    A few classes occur twice; a fifth are ignored, all of a tenth of the tokens.
    """
    x, (tokens, _, vocab) = options_case(names, *sizes, **more), sizes
    index = torch.randint(vocab, (tokens, classes))
    if classes > 2:
        index[:, classes // 2], index[:, -1] = index[:, 0], index[:, 1]
    index[torch.rand(tokens, classes) < 0.2] = -100
    index[torch.rand(tokens) < 0.1] = -100
    counts = index != -100
    values = torch.randn(tokens, classes, dtype=torch.float64) * counts
    if kind == "of sum 0":
        values = values - values.sum(1, keepdim=True) / counts.sum(1, keepdim=True).clamp(1)
        values = values * counts
    elif kind == "of one class":
        values[:, 1:] *= 1e-6
        values[::2] = values[::2].flip(1)
    elif kind == "0":
        values[::2] = 0
    upstream = {"log_probs": values}
    upstream |= {name: torch.randn(tokens, dtype=torch.float64) for name in outputs}
    device = x.case.h.device
    return ClassesCase(x, index.to(device), {name: up.to(device) for name, up in upstream.items()})


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())
