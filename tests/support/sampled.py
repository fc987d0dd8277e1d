"""Sampled gradients from all logits in float64: which entries are kept, and what they give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cutefce.cute_kernels import process_cache
from cutefce.ops.program.calls import TABLE
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.sampling import sample_sizes
from cutefce.ops.sampling.steps import SampleKind
from tests.support.options import OptionsCase, losses_of_logits, model_logits

Words = NDArray[np.uint32]


def estimate_of(columns: int, patch: pytest.MonkeyPatch) -> None:
    """Estimate log-sum-exps of so many classes."""
    patch.setattr(sample_sizes, "ESTIMATE_COLUMNS", columns)
    process_cache.reset()  # programs depend on it


def change_estimates(change: Callable[[Tensor], Tensor], patch: pytest.MonkeyPatch) -> None:
    """Put other numbers in the place of estimates of log-sum-exps (N,)."""

    def changed(call: Call) -> None:
        call.values["estimate"] = change(call.values["estimate"])

    after(SampleKind.ESTIMATE, changed, patch)


def after(kind: SampleKind, do: Callable[[Call], None], patch: pytest.MonkeyPatch) -> None:
    """Do something after each step of a kind."""
    own = TABLE[kind]

    def both(call: Call, s: Step) -> None:
        own(call, s)
        do(call)

    patch.setitem(TABLE, kind, both)


def mix(x: Words) -> Words:
    """Return the finalizer of `sampling.random_bits`, of 32-bit words."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def words(x: Tensor) -> Words:
    """Return integers modulo 2^32."""
    return (x.cpu().to(torch.int64) & 0xFFFFFFFF).numpy().astype(np.uint32)


def row_states(seed: Tensor, rows: Tensor) -> Words:
    """Return what the random bits of rows (R,) are made of."""
    first, second = words(seed)
    states: Words = mix(first ^ words(rows) * np.uint32(0x9E3779B1)) ^ second
    return states


def bits(seed: Tensor, rows: Tensor, columns: Tensor) -> Words:
    """Return the random bits (R, C) of rows (R,) and columns (C,)."""
    return mix(row_states(seed, rows)[:, None] ^ words(columns) * np.uint32(0x85EBCA77))


def next_seed() -> Tensor:
    """Return the seed that the next call on a CPU draws, without drawing it."""
    state = torch.random.get_rng_state()
    seed = torch.randint(-(1 << 31), 1 << 31, (2,), dtype=torch.int32)
    torch.random.set_rng_state(state)
    return seed


def relative(x: OptionsCase) -> tuple[Tensor, Tensor]:
    """Return p_iv and p_iv du/dt (N, V) in float64, the latter over du/dt without a softcap."""
    u = model_logits(x.case.h.double() @ x.case.w.double().t(), **_double(x))
    p, cap = u.softmax(1), x.options.get("softcap")
    if cap is None:
        return p, p
    temperature = torch.as_tensor(x.options.get("temperature", 1.0), dtype=torch.float64)
    bound = cap / (temperature[:, None] if temperature.ndim else temperature)
    return p, p * (1 - (u / bound).square())


def sampled(
    x: OptionsCase, seed: Tensor, samples: int, estimate: Tensor | None = None, **more: Any
) -> tuple[Tensor, ...]:
    """Return losses and gradients in float64, of the entries that `seed` keeps.

    `estimate` (N,) is the estimate of lse over lse; None if that is exact.
    """
    leaves = (*(leaf.detach().double().requires_grad_() for leaf in x.leaves),)
    options, y, tokens = (
        _double(replace(x, options=x.with_leaves(leaves))) | more,
        x.case.y,
        len(x.case.y),
    )
    t = leaves[0] @ leaves[1].t()
    u = model_logits(t, **options)
    loss = losses_of_logits(u, y, **options)
    upstream = x.case.upstream.double() if loss.ndim else None
    (du,) = torch.autograd.grad(loss, u, upstream, retain_graph=True)
    p, stored = relative(x)
    chance = stored * samples
    if estimate is not None:
        chance = chance / estimate[:, None]
    q = chance.clamp(max=1)
    columns = torch.arange(p.shape[1])
    kept = torch.from_numpy(bits(seed, torch.arange(tokens), columns).astype(np.int64))
    kept = (kept < (q * 2.0**32).floor()) | (q >= 1)
    factor = torch.where(q > 0, kept / q, 0)
    is_target = columns == y[:, None]
    # the softmax's part of du, α p, of which γ κ is taken away
    class_part = _class_part(x, upstream, more)
    softmax_part = torch.where(is_target, 0, du + class_part)
    du = du + softmax_part * (factor - 1)
    return loss.detach(), *torch.autograd.grad(u, leaves, du)


def _class_part(x: OptionsCase, upstream: Tensor | None, more: dict[str, Any]) -> Tensor:
    """Return γ_i κ_v (N, V), the part of label smoothing."""
    y, vocab, options = x.case.y, x.case.w.shape[0], _double(x) | more
    smoothing = options.get("label_smoothing", 0.0)
    kappa = options.get("weight", torch.ones(vocab, dtype=torch.float64))
    token = options.get("token_weights", torch.ones(len(y), dtype=torch.float64))
    token = torch.where(y == options.get("ignore_index", -100), 0, token)
    scale = torch.ones(len(y), dtype=torch.float64) if upstream is None else upstream
    if options.get("reduction", "none") == "mean":
        scale = scale / (token * kappa[y.clamp(min=0)]).sum()
    part: Tensor = (smoothing / vocab * scale * token)[:, None] * kappa
    return part


def _double(x: OptionsCase) -> dict[str, Any]:
    """Return the options, tensors in float64."""
    return {k: v.double() if isinstance(v, Tensor) else v for k, v in x.options.items()}
