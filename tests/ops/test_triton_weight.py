"""Triton's kernel of dW against the same in plain torch.

Without a GPU, Triton's interpreter runs it, see `tests.support.plugin`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.ops.rows.coefficients import RankOne
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.selection import CountedRows
from tests.support.packed_sums import joined_sums
from tests.support.tiers import rest_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's numpy has it
pytest.importorskip("triton")
kernels = pytest.importorskip("cutefce.ops.primitives.triton_weight")
tiles = pytest.importorskip("cutefce.ops.primitives.triton_kernels")

SIZES = [(130, 264, 300), (170, 40, 129), (1, 64, 256)]
"""Tokens, hidden and classes: tiles that are partly or wholly in range."""
FIRST = 20
"""The class of the window's first row."""
sizes = pytest.mark.parametrize("sizes", rest_slow(SIZES), ids=str)


@pytest.fixture(autouse=True, params=rest_slow({"descriptors": True, "addresses": False}))
def a_small_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    features = tiles.HOPPER_FEATURES if request.param else 32
    monkeypatch.setattr(kernels, "device_of", lambda _: tiles.Device(3, features, request.param))


class Case:
    """Random operands of some rows of dW, and what they are in float64."""

    def __init__(self, sizes: tuple[int, int, int]) -> None:
        torch.manual_seed(0)
        tokens, hidden, classes = sizes
        pitch = -(-classes // 8) * 8
        self.exps = torch.rand(tokens, pitch, device=DEVICE).to(DTYPE)[:, :classes]
        self.states = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
        h = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
        target = torch.randint(FIRST + classes + 5, (tokens,), device=DEVICE)
        target[::3] = FIRST + 1
        coefficient = torch.randn(tokens, device=DEVICE)
        coefficient[::5] = 0
        vocab = FIRST + classes + 5
        self.listed = kernels.Listed.of(h, target, coefficient, vocab)
        self.term = RankOne(torch.randn(classes, device=DEVICE), torch.randn(hidden, device=DEVICE))
        terms = torch.zeros(vocab, hidden, device=DEVICE, dtype=torch.float64)
        terms.index_add_(0, target, coefficient.double()[:, None] * h.double())
        self.product = self.exps.double().t() @ self.states.double()
        self.terms = terms[FIRST : FIRST + classes]

    def run(self, out: Tensor | Sums, listed: bool = True, **more: Any) -> None:
        operands = self.exps, self.states, FIRST, self.listed if listed else None
        out = out if isinstance(out, Sums) else Sums(out)
        kernels.weight_product(out, *operands, **more)


def empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(like.shape, torch.nan, device=DEVICE).to(dtype)


@sizes
def test_rows_are_rounded_once(sizes: tuple[int, int, int]) -> None:
    x, last = Case(sizes), torch.tensor(0.37, device=DEVICE)
    out = empty(x.product, DTYPE)
    x.run(out, last=last, rank_one=x.term)
    term = x.term.factor.double()[:, None] * x.term.row.double()
    want = (x.product + x.terms + term) * last.double()
    torch.testing.assert_close(out, want.to(DTYPE), rtol=2**-7, atol=1e-4)
    x.run(out, listed=False)
    torch.testing.assert_close(out, x.product.to(DTYPE), rtol=2**-7, atol=1e-4)


def test_what_terms_of_targets_leave() -> None:
    """Products that these cancel have errors of half of the last of 16 bits, without a bias."""
    x = Case((170, 264, 129))
    x.states.abs_()  # no product is near 0
    x.product = x.exps.double().t() @ x.states.double()
    h = x.product.to(DTYPE)
    target = torch.arange(FIRST, FIRST + 129, device=DEVICE)
    x.listed = kernels.Listed.of(h, target, -torch.ones(129, device=DEVICE), FIRST + 129)
    out = empty(x.product, DTYPE)
    x.run(out)
    error = (out.double() - (x.product - h.double())) / x.product
    assert float(error.abs().max()) < 1.3 * 2.0**-16
    assert abs(float(error.mean())) < 2.0**-19


@sizes
def test_sums_are_added_to_a_buffer(sizes: tuple[int, int, int]) -> None:
    x = Case(sizes)
    out = torch.ones(x.product.shape, device=DEVICE)
    x.run(out, accumulate=True)
    torch.testing.assert_close(out.double(), 1 + x.product + x.terms, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("low_bits", [8, 4])
@sizes
def test_sums_are_packed(sizes: tuple[int, int, int], low_bits: int) -> None:
    x = Case(sizes)
    classes, hidden = x.product.shape
    words = torch.empty(classes, hidden, dtype=torch.bfloat16, device=DEVICE)
    low = torch.empty(classes, hidden * low_bits // 8, dtype=torch.uint8, device=DEVICE)
    x.run(Sums(words, low), listed=False)
    # a sum is rounded to 8 + low_bits digits, each time that it is packed
    near = 2.0 ** -(8 + low_bits) * float(x.product.abs().max())
    torch.testing.assert_close(joined_sums(words, low).double(), x.product, rtol=0, atol=near)
    x.run(Sums(words, low), accumulate=True)
    want = 2 * x.product + x.terms
    near = 3 * 2.0 ** -(8 + low_bits) * float(want.abs().max())
    torch.testing.assert_close(joined_sums(words, low).double(), want, rtol=0, atol=near)


def test_rows_that_do_not_count_are_not_read() -> None:
    x = Case((260, 64, 128))
    counted = CountedRows.of(torch.arange(260, device=DEVICE) < 100)
    x.exps[128:] = torch.nan
    x.states[100:] = 0
    out = empty(x.product, torch.float32)
    x.run(out, counted=counted)
    want = x.exps[:100].double().t() @ x.states[:100].double() + x.terms
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)
