"""Problems with a diverged row, and torch's results for them."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.reference import Case, Result, evaluate

ROW = 70
"""The row that is broken; it is in the second chunk and in no first row block."""
ALONE, PAIR, OPPOSITE, NEAR, PLAIN = 7, (5, 300), 200, 8, 100
"""Vocabulary entries with large logits for the hidden states below."""

OVERFLOWS: dict[str, tuple[int, float, int]] = {
    "target +inf": (2, 0.9, ALONE),
    "target +inf, as another": (0, 0.9, PAIR[0]),
    "another +inf": (2, 0.9, PLAIN),
    "all +inf": (1, 0.9, PLAIN),
    "target -inf": (2, -0.9, ALONE),
    "target -inf, another +inf": (0, 0.9, OPPOSITE),
    "another -inf": (2, -0.9, PLAIN),
    "all -inf": (1, -0.9, PLAIN),
    "target near the largest number": (3, 0.9, NEAR),
    "target near the lowest number": (3, -0.9, NEAR),
    "another near the largest number": (3, 0.9, PLAIN),
}
"""Hidden feature, its value as a part of the dtype's largest, and target: finite h and w."""

GIVEN: dict[str, tuple[int, float, int]] = {
    "h NaN": (4, torch.nan, PLAIN),
    "h +inf, target +inf": (4, torch.inf, ALONE),
    "h +inf, target -inf": (4, torch.inf, OPPOSITE),
    "h +inf, all +inf": (1, torch.inf, PLAIN),
    "h -inf, all -inf": (1, -torch.inf, PLAIN),
}
"""Hidden feature, its value, and target."""

WEIGHTS = {"w NaN": torch.nan, "w +inf": torch.inf, "w -inf": -torch.inf}
"""A value in the weight, which gives every row a logit that is not finite."""

FEW = ["target +inf", "all -inf", "another near the largest number", "h NaN", "w NaN", "w -inf"]
"""One of each kind."""


def names(dtype: torch.dtype) -> Iterator[str]:
    """Yield what can be broken: products of float16 do not overflow float32."""
    yield from GIVEN
    yield from WEIGHTS
    if dtype != torch.float16:
        yield from OVERFLOWS


def healthy_case(dtype: torch.dtype, device: str = "cpu") -> Case:
    """Return 150 tokens of 48 features and 333 entries, of which `ROW` has hidden states of 0."""
    torch.manual_seed(0)
    h, w, y = torch.randn(150, 48), torch.randn(333, 48), torch.randint(333, (150,))
    h[ROW] = 0
    w[:, :4] = 0
    w[:, 1] = 2
    w[[*PAIR, OPPOSITE], 0] = torch.tensor([2.0, 2.0, -2.0])
    w[ALONE, 2], w[NEAR, 3] = 2, 0.25
    w[ALONE, 4], w[OPPOSITE, 4] = 1, -1
    upstream = torch.ones(150, dtype=torch.promote_types(dtype, torch.float32))
    return Case(h.to(device, dtype), w.to(device, dtype), y.to(device), upstream.to(device))


def broken_case(name: str, dtype: torch.dtype, device: str = "cpu") -> Case:
    """Return `healthy_case` with one thing broken."""
    case = healthy_case(dtype, device)
    if name in WEIGHTS:
        case.w[ALONE, 5] = WEIGHTS[name]
        case.y[:75] = ALONE
        return case
    feature, value, target = (OVERFLOWS | GIVEN)[name]
    part = torch.finfo(dtype).max if name in OVERFLOWS else 1.0
    case.h[ROW, feature], case.y[ROW] = value * part, target
    return case


def torch_result(case: Case) -> Result:
    """Evaluate torch's loss of logits that are rounded to float32, or float64."""
    dtype = torch.promote_types(case.h.dtype, torch.float32)

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h.to(dtype), w.to(dtype)), case.y, reduction="none")

    return evaluate(case, loss)


def assert_same_kind(got: Tensor, want: Tensor) -> None:
    """Assert that losses are NaN, inf or about the same finite number together."""
    finite = want.isfinite()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    torch.testing.assert_close(got[finite], want[finite])


def assert_no_healthier(got: Tensor, want: Tensor) -> None:
    """Assert that a gradient is finite nowhere where torch's is not."""
    assert not bool((got.isfinite() & ~want.isfinite()).any())
