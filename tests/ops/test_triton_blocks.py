"""Triton's kernels of the largest logits against plain torch.

Without a GPU, Triton's interpreter runs it, see `tests.support.plugin`.
"""

from typing import Any

import pytest
import torch

from cutefce.cute_kernels.integers import ceil_div
from tests.ops.test_triton_kernels import DEVICE, DTYPE, kernels, logits
from tests.support.outputs import floors
from tests.support.tiers import rest_slow

triton_blocks = pytest.importorskip("cutefce.ops.outputs.triton_blocks")


@pytest.mark.parametrize("options", rest_slow(["", "scale bias cap floor", "bias"]))
@pytest.mark.parametrize("sizes", rest_slow([(130, 64, 900), (1, 72, 256), (70, 128, 600)]))
def test_the_kernel_of_blocks(
    sizes: tuple[int, int, int], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = kernels.Device(3, 32, has_tma=False)
    monkeypatch.setattr(triton_blocks, "device_of", lambda _: small)
    tokens, hidden, classes = sizes
    h = torch.randn(tokens, hidden, device=DEVICE).to(DTYPE)
    w = (torch.randn(classes, hidden, device=DEVICE) / hidden**0.5).to(DTYPE)
    row_scale = torch.rand(tokens, device=DEVICE) + 0.5 if "scale" in options else None
    bias = torch.randn(classes, device=DEVICE) if "bias" in options else None
    transform: Any = (row_scale, bias, 0.3 if "cap" in options else None)
    u, y = logits(h, w, transform), torch.randint(-1, classes, (tokens,), device=DEVICE)
    if "floor" in options:
        floor = floors(u)
        transform = (*transform, floor)
        u = torch.where(u < floor[:, None], -torch.inf, u)
    u[y[:, None] == torch.arange(classes, device=DEVICE)] = -torch.inf
    block = 128
    count = ceil_div(classes, block)
    chosen = torch.rand(tokens, count, device=DEVICE).argsort(1)[:, : min(2, count)]
    chosen[: tokens // 2, 0] = count - 1  # many tokens of one block, some twice
    k = 5
    values, found = triton_blocks.top_of_blocks(h, w, chosen, block, k, y, transform)
    padded = torch.full((tokens, count * block), -torch.inf, device=DEVICE)
    padded[:, :classes] = u
    each = padded.view(tokens, count, block)
    each = each.gather(1, chosen[:, :, None].expand(-1, -1, block))
    torch.testing.assert_close(values, each.topk(k).values, rtol=2e-4, atol=1e-5)
    # which of nearly equal ones are found is a matter of roundings
    assert bool((found // block == chosen[:, :, None]).all())
    of_found, finite = padded.gather(1, found.flatten(1)).view_as(values), values > -torch.inf
    torch.testing.assert_close(of_found[finite], values[finite], rtol=2e-4, atol=1e-5)
    distinct = torch.where(finite, found, -1 - torch.arange(k, device=DEVICE)).sort().values
    assert bool((distinct.diff() > 0).all())


@pytest.mark.parametrize("columns", rest_slow([594, 1, 64]))
def test_the_largest_of_rows(columns: int) -> None:
    x = torch.randn(40, columns, device=DEVICE)
    x[::3, columns // 2 :] = -torch.inf
    x[1::3] = -torch.inf
    x[2], x[5, 0] = torch.nan, torch.nan
    k = min(columns, 8)
    values, places = triton_blocks.largest_of_rows(x, k)
    for want in (x.topk(k, 1).values, x.gather(1, places)):
        torch.testing.assert_close(values, want, rtol=0, atol=0, equal_nan=True)
    assert k == 1 or bool((places.sort(1).values.diff(dim=1) > 0).all())  # each once
    assert int(places.min()) >= 0 and int(places.max()) < columns
