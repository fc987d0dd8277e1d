"""Triton's kernel of the logits of chosen blocks against plain torch.

Without a GPU, Triton's interpreter runs it, see `tests.support.plugin`.
"""

import pytest
import torch

from cutefce.cute_kernels.integers import ceil_div
from tests.ops.test_triton_kernels import DEVICE, DTYPE, kernels, logits
from tests.support.tiers import rest_slow

triton_blocks = pytest.importorskip("cutefce.ops.primitives.triton_blocks")


@pytest.mark.parametrize("options", rest_slow(["", "scale bias cap", "bias"]))
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
    transform = row_scale, bias, 0.3 if "cap" in options else None
    block = triton_blocks.BLOCK
    count = ceil_div(classes, block)
    chosen = torch.rand(tokens, count, device=DEVICE).argsort(1)[:, : min(2, count)]
    chosen[: tokens // 2, 0] = count - 1  # many tokens of one block, some twice
    got = triton_blocks.logits_of_blocks(h, w, chosen, transform)
    want = torch.full((tokens, count * block), -torch.inf, device=DEVICE)
    want[:, :classes] = logits(h, w, transform)
    want = want.view(tokens, count, block).gather(1, chosen[:, :, None].expand(-1, -1, block))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-5)
