"""Property tests: any call that hypothesis generates is as accurate as the unfused loss."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cutefce

SIZES = st.integers(1, 70)
CALLS = st.fixed_dictionaries(
    {
        "tokens": st.integers(0, 70),
        "hidden": SIZES,
        "vocab": st.one_of(SIZES, st.integers(1000, 1100), st.integers(4090, 4100)),
        "logit_std": st.sampled_from([0.01, 1.0, 10.0, 100.0]),
        "ignored": st.sampled_from([0.0, 0.5, 1.0]),
        "ignore_index": st.sampled_from([-100, 0, 2**40]),
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "workspace": st.one_of(st.sampled_from(["min", "max", None]), st.integers(0, 1 << 22)),
        "train": st.sampled_from([(True, True), (True, False), (False, True)]),
        "transposed": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CALLS)
def test_any_call(call: dict[str, Any]) -> None:
    torch.manual_seed(call["seed"])
    tokens, hidden, vocab = call["tokens"], call["hidden"], call["vocab"]
    h = torch.randn(tokens, hidden, dtype=torch.float64)
    w = torch.randn(vocab, hidden, dtype=torch.float64) * (call["logit_std"] / hidden**0.5)
    if call["transposed"]:
        w = w.t().contiguous().t()
    y = torch.randint(vocab, (tokens,))
    y[torch.rand(tokens) < call["ignored"]] = call["ignore_index"]
    h.requires_grad_(call["train"][0])
    w.requires_grad_(call["train"][1])
    trained = [x for x in (h, w) if x.requires_grad]
    options = {name: call[name] for name in ("reduction", "ignore_index")}

    got = cutefce.linear_cross_entropy(h, w, y, **options, workspace=call["workspace"])
    want = F.cross_entropy(F.linear(h, w), y, **options)
    if call["reduction"] == "mean" and not bool((y != call["ignore_index"]).any()):
        want = F.cross_entropy(
            F.linear(h, w), y, ignore_index=call["ignore_index"], reduction="sum"
        )
    upstream = torch.randn_like(got)
    results = [got, *torch.autograd.grad(got, trained, upstream)]
    wanted = [want, *torch.autograd.grad(want, trained, upstream)]
    # the largest logit sets the rounding that either form starts from
    largest = float((h @ w.t()).detach().abs().max()) if tokens else 0.0
    for a, b in zip(results, wanted, strict=True):
        limit = 64 * torch.finfo(torch.float64).eps * (1 + largest) * (1 + float(b.detach().norm()))
        assert float((a - b).norm()) <= limit
