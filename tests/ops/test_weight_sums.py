"""dW's sums over chunks, in 24 and 20 bits, and their rounding."""

import dataclasses

import pytest

from cutefce.cute_kernels.arch.sm90 import KEPT_128, KEPT_192, LOW
from cutefce.cute_kernels.spec import GradGemmSpec
from cutefce.ops.primitives.cute_gradients import kept_sums_kernel


@pytest.mark.parametrize(
    ("rows", "columns"), [(512, 128), (4096, 128), (8448, 192), (131072, None)]
)
def test_sums_of_few_rows_have_tiles_of_their_own(rows: int, columns: int | None) -> None:
    """On 66 clusters, 4096 rows are 352 tiles of 192 columns in 6 waves, 512 of 128 in 8."""
    for config in (KEPT_128, KEPT_192):
        kernel = GradGemmSpec("sm_90a", "bfloat16", config, "weight", final=False, low_bits=8)
        found = kept_sums_kernel(kernel, (rows, 4096, 8192), 132)
        assert found.config.tile_n == (columns or config.tile_n)
        assert dataclasses.replace(found, config=config) == kernel
    own = dataclasses.replace(kernel, config=LOW)
    assert kept_sums_kernel(own, (rows, 4096, 512), 132) is own


def test_sums_of_few_products_have_narrow_tiles() -> None:
    """Their epilogues take longer than their MMAs."""
    kernel = GradGemmSpec("sm_90a", "bfloat16", KEPT_192, "weight", final=False, low_bits=8)
    for tokens, columns in ((512, 128), (1023, 128), (1024, 192), (8192, 192)):
        assert kept_sums_kernel(kernel, (131072, 4096, tokens), 132).config.tile_n == columns
