"""The logit transform of a call: from products of hidden states and weight to its logits."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface.arguments import LossOptions, TensorOptions


@dataclass(frozen=True)
class LogitMap:
    """The model's logits u of raw ones t_iv = h_i · w_v, with tensors in the dtype of sums.

        u_iv = κ_i (t_iv + b_v)
        u_iv = κ_i tanh(s (t_iv + b_v))     with a softcap

    Of a logit scale a, a bias β, a softcap c and temperatures T_i, these are κ_i = a / T_i, or
    c / T_i with a softcap; b = β / a; s = a / c.  Of a truncated softmax there are floors, too.
    """

    row_scale: Tensor | None
    """(N,) κ; None for 1."""
    bias: Tensor | None
    """(V,) b of this rank's classes; None for 0."""
    slope: float | None
    """s; None without a softcap."""
    factor: Tensor | None
    """() or (N,) a / T, which is du/dt without the softcap's part of it; None for 1."""
    scale: float
    """a"""
    floor: Tensor | None = None
    """(N,) below which logits u but the target's count as -inf; None for none.

    What sums or stores exponentials applies it: it knows the targets."""

    @staticmethod
    def of(
        options: LossOptions, tensors: TensorOptions, y: Tensor, dtype: torch.dtype
    ) -> "LogitMap | None":
        """Return the map of a call with targets y (N,) and sums of `dtype`; None for identity."""
        scale, cap, bias = options.logit_scale, options.softcap, tensors.linear_bias
        if bias is not None:
            bias = bias.to(dtype)
            bias = bias / scale if scale != 1 else bias.contiguous()
        floor = tensors.logit_floor
        floor = None if floor is None else floor.to(dtype).contiguous()
        if tensors.temperature is None and not options.transforms_logits:
            is_identity = bias is None and floor is None
            return None if is_identity else LogitMap(None, bias, None, None, scale, floor)
        if tensors.temperature is None:
            inverse = torch.ones((), dtype=dtype, device=y.device)
        else:
            inverse = tensors.temperature.to(dtype).reciprocal()
        factor = inverse * scale
        row_scale = factor if cap is None else inverse * cap
        slope = None if cap is None else scale / cap
        row_scale = row_scale.expand(y.shape).contiguous()
        return LogitMap(row_scale, bias, slope, factor, scale, floor)

    @property
    def cap(self) -> Tensor | None:
        """(N,) the bound of the logits, κ; None without a softcap."""
        return None if self.slope is None else self.row_scale

    def rows(self, rows: slice | Tensor) -> "LogitMap":
        """Return the map of some of the tokens."""
        of_tokens = {"row_scale": self.row_scale, "factor": self.factor, "floor": self.floor}
        own: Any = {name: x[rows] for name, x in of_tokens.items() if x is not None and x.ndim}
        return replace(self, **own)

    def part(self, rows: slice | Tensor, columns: slice) -> "LogitMap":
        """Return the map of some of the tokens and a slice of the classes."""
        part = self.rows(rows)
        return part if self.bias is None else replace(part, bias=self.bias[columns])

    def columns(self, first: int, last: int) -> tuple[Any, ...]:
        """Return what a launch is given: κ (N,), b of the columns [first, last), and s.

        Floors (N,) follow, if there are any.
        """
        bias = None if self.bias is None else self.bias[first:last]
        own = self.row_scale, bias, self.slope
        return own if self.floor is None else (*own, self.floor)

    def apply_(self, t: Tensor) -> None:
        """Replace raw logits t (N, V) by the model's."""
        if self.bias is not None:
            t.add_(self.bias)
        if self.slope is not None:
            t.mul_(self.slope).tanh_()
        if self.row_scale is not None:
            t.mul_(self.row_scale[:, None])

    def apply_at(self, t: Tensor, index: Tensor) -> Tensor:
        """Return the model's logits of raw ones t, of the classes `index`, both (N,) or (N, K)."""
        if self.bias is not None:
            t = t + self.bias[index]
        if self.slope is not None:
            t = (t * self.slope).tanh()
        return t if self.row_scale is None else t * by_rows(self.row_scale, t)

    def derivative(self, u: Tensor) -> Tensor | float:
        """Return du/dt at the model's logits u, (N,) or (N, K), in a shape to multiply these."""
        factor = 1.0 if self.factor is None else by_rows(self.factor, u)
        return factor * self.cap_derivative(u)

    def cap_derivative(self, u: Tensor) -> Tensor | float:
        """Return the softcap's part of `derivative`, which stored exponentials contain."""
        if self.slope is None or self.row_scale is None:
            return 1.0
        return 1 - (u / by_rows(self.row_scale, u)).square()


def by_rows(factor: Tensor, x: Tensor) -> Tensor:
    """Return a factor () or (N,) in a shape to multiply x, (N,) or (N, K)."""
    return factor[:, None] if factor.ndim and x.ndim > 1 else factor


def copies_tiles(options: LossOptions, tensors: TensorOptions) -> bool:
    """Whether plain torch has a copy of a tile of logits beside it while they are mapped."""
    return options.softcap is not None or tensors.logit_floor is not None
