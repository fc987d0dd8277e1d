"""Triton's kernel of exponentials against the same function in plain torch.

Without a GPU, Triton's interpreter runs it, see `tests.support.plugin`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.elementwise import exponentials_
from cutefce.ops.rows.partial_sums import PartialSums
from cutefce.ops.rows.selection import CountedRows
from tests.support.outputs import floors
from tests.support.tiers import rest_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = (
    torch.bfloat16 if DEVICE == "cuda" else torch.float16
)  # numpy, in which the interpreter computes, has it
pytest.importorskip("triton")
kernels = pytest.importorskip("cutefce.ops.primitives.triton_kernels")

OPTIONS = ["", "scale floor", "scale bias cap", "scale", "bias"]
SIZES = [(130, 64, 300), (1, 72, 256), (70, 128, 600), (128, 64, 100)]
"""Tokens, hidden and classes: tiles that are partly or wholly in range."""


@pytest.fixture(autouse=True, params=[True, False], ids=["descriptors", "addresses"])
def a_small_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    features = kernels.HOPPER_FEATURES if request.param else 32
    monkeypatch.setattr(kernels, "device_of", lambda _: kernels.Device(3, features, request.param))


def operands(sizes: tuple[int, int, int], std: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random h (N, D), w (V, D) and target (N,)."""
    tokens, hidden, classes = sizes
    h = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
    w = (torch.randn(classes, hidden, device=DEVICE) * std / hidden**0.5).to(DTYPE)
    y = torch.randint(classes, (tokens,), device=DEVICE)
    y[::5] = -100
    return h, w, y


def logits(h: Tensor, w: Tensor, transform: Any) -> Tensor:
    """Return the transformed logits u (N, V) in float32."""
    row_scale, bias, slope = transform[:3]
    u = h.float() @ w.float().t()
    if bias is not None:
        u = u + bias
    if slope is not None:
        u = (u * slope).tanh()
    return u if row_scale is None else u * row_scale[:, None]


def target_logit(u: Tensor, y: Tensor) -> Tensor:
    """Return the reference (N,), +inf if ignored."""
    return torch.where(y < 0, torch.inf, u.gather(1, y.clamp(min=0)[:, None])[:, 0])


def expected(
    u: Tensor, y: Tensor, reference: Tensor, transform: Any, out: dict[str, Tensor]
) -> Tensor:
    """Return exponentials (N, V) as plain torch computes them; it fills `out`."""
    block = kernels.BLOCK
    width = ceil_div(u.shape[1], block) * block
    padded = torch.full((len(u), width), -torch.inf, device=DEVICE)
    padded[:, : u.shape[1]] = u
    tiles, start = padded.view(len(u), -1, block), torch.zeros((), dtype=torch.int64, device=DEVICE)
    cap = transform[0] if transform[2] is not None else None
    floor = transform[3] if len(transform) > 3 else None
    names = "sums", "references", "of_all", "largest", "of_others"
    exponentials_(tiles, start, reference, y, None, cap, floor, *map(out.get, names))
    return padded[:, : u.shape[1]]


@pytest.mark.parametrize("sizes", rest_slow(SIZES))
@pytest.mark.parametrize("std", [1.0, 60.0])
@pytest.mark.parametrize("options", rest_slow(OPTIONS, default=2))
def test_exponentials_and_sums(sizes: tuple[int, int, int], std: float, options: str) -> None:
    torch.manual_seed(0)
    h, w, y = operands(sizes, std)
    tokens, _, classes = sizes
    count = ceil_div(classes, kernels.BLOCK)
    row_scale = torch.rand(tokens, device=DEVICE) + 0.5 if "scale" in options else None
    bias = torch.randn(classes, device=DEVICE) if "bias" in options else None
    transform: Any = (row_scale, bias, 0.3 if "cap" in options else None)
    u = logits(h, w, transform)
    if "floor" in options:
        transform = (*transform, floors(u))
    reference = target_logit(u, y)
    want = {
        "sums": torch.empty(tokens, count, device=DEVICE),
        "references": torch.empty(tokens, count, device=DEVICE),
        "of_all": torch.empty(4, tokens, count, device=DEVICE),
        "largest": torch.empty(tokens, count, device=DEVICE),
        "of_others": torch.empty(2, tokens, count, device=DEVICE),
    }
    got = {name: torch.full_like(x, torch.nan) for name, x in want.items()}
    exps = torch.full((tokens, ceil_div(classes, 8) * 8), torch.nan, device=DEVICE).to(DTYPE)
    wanted = expected(u, y, reference, transform, want)
    kernels.project(h, w, (0, classes), reference, y, exps, PartialSums(**got), transform)
    close: dict[str, Any] = {"rtol": 2e-4 * std, "atol": 1e-5 * std, "equal_nan": True}
    # logits that a softcap makes equal are above the target's or not by their last bits
    tied = (u - reference[:, None]).abs() <= close["atol"]
    padded = torch.zeros(tokens, count * kernels.BLOCK, device=DEVICE)
    padded[:, :classes] = tied
    above, ties = want["of_others"][1], padded.view(tokens, count, -1).sum(2)
    assert bool(((got["of_others"][1] - above).abs() <= ties).all())
    got["of_others"][1] = above
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, **close)
    active = y >= 0
    assert not exps[~active, :classes].any()
    wanted = wanted[active].to(DTYPE).float()
    torch.testing.assert_close(exps[active, :classes].float(), wanted, rtol=0.01 * std, atol=1e-6)


@pytest.mark.parametrize("first", [0, 128, 300])
def test_row_blocks_without_rows_that_count_are_left_out(first: int) -> None:
    torch.manual_seed(0)
    h, w, y = operands((300, 64, 300))
    y[150:] = -100
    reference, plain = target_logit(logits(h, w, (None, None, None)), y), (None, None, None)
    counted = CountedRows.of(y >= 0)
    left = counted.of_products(300)
    assert left == 128 * ceil_div(int((y >= 0).sum()), 128) < 300
    chunk = counted.behind(first)
    rows = chunk.of_products(300 - first % 300)
    assert rows == max(128, left - first)
    results, parts = [], ceil_div(300, kernels.BLOCK)
    for only in (None, chunk):
        exps = torch.full((300, 304), 7.0, device=DEVICE).to(DTYPE)
        sums = PartialSums(*torch.full((2, 300, parts), 7.0, device=DEVICE))
        kernels.project(h, w, (0, 300), reference, y, exps, sums, plain, only)
        results.append((exps[:, :300], sums.sums, sums.references))
    for whole, part in zip(*results, strict=True):
        assert torch.equal(part[:rows], whole[:rows])
        assert bool((part[rows:] == 7).all())


def test_columns_of_a_window_without_sums() -> None:
    torch.manual_seed(0)
    h, w, y = operands((130, 64, 1000))
    u, plain = logits(h, w, (None, None, None)), (None, None, None)
    reference = target_logit(u, y)
    wanted = expected(u, y, reference, plain, {})[:, 256:768]
    exps = torch.empty(130, 512, device=DEVICE).to(DTYPE)
    kernels.project(h, w, (256, 768), reference, y, exps)
    torch.testing.assert_close(exps.float(), wanted, rtol=0.01, atol=1e-6)


def test_blocks_of_other_references_are_rescaled() -> None:
    torch.manual_seed(0)
    exps = torch.rand(70, 520, device=DEVICE).to(DTYPE)
    references = torch.zeros(70, ceil_div(520, kernels.BLOCK), device=DEVICE)
    references[3, 1], references[65, 2], references[9] = 2.0, torch.inf, torch.inf
    reference = torch.ones(70, device=DEVICE)
    reference[3], reference[65], reference[9] = 3.0, torch.inf, torch.inf
    references[10:] = reference[10:, None]
    factor = torch.where(
        references == reference[:, None], 1, (references - reference[:, None]).exp()
    )
    want = exps.float() * factor.repeat_interleave(kernels.BLOCK, 1)[:, :520]
    kernels.rescale(exps, references, reference)
    torch.testing.assert_close(exps, want.to(DTYPE))
