"""Configurations: how to compute a problem, as frozen and printable dataclasses."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class PortableTiles:
    """Windows of contiguous columns that are processed one after the other, each in tiles."""

    window: int
    """Columns whose exponentials are in memory at once: the paper's window size."""
    reference_block: int
    """Columns whose exponentials share a reference; divides `tile_columns`."""
    tile_columns: int
    """Columns of one tile of logits; divides `window`.  The kernels' windows are one tile each."""
    tile_rows: int
    """Rows of one tile of logits; with fewer tokens, tiles are wider."""

    def columns(self, tokens: int) -> int:
        """Return the columns of a tile for `tokens` rows in total."""
        columns, area = self.tile_columns, self.tile_columns * self.tile_rows
        while 2 * columns <= self.window and 2 * columns * tokens <= area:
            columns *= 2
        return columns


@dataclass(frozen=True)
class GemmConfig:
    """Tiling and pipelining of a bᵀ; in `project_exp`, a is h and b is w."""

    tile_m: int
    """Rows of a thread block's tile."""
    tile_n: int
    """Columns of a tile."""
    cluster: int
    """Thread blocks of a cluster: they compute different rows and share each tile of b, of which on
    Blackwell each holds a part."""
    stages: int
    """Pipeline stages, each one K tile of a and b."""
    pingpong: bool
    """Hopper: whether the two warpgroups alternate on separate tiles, or share each tile."""
    raster_group: int = 8
    """Row blocks that are computed concurrently, so that their rows of a stay in the L2 cache."""

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}"]
        parts += ["ping-pong"] * self.pingpong
        parts += [f"cluster {self.cluster}", f"{self.stages} stages"]
        return ", ".join(parts)

    @property
    def rows(self) -> int:
        """Rows of a row block: the rows, or tokens, that one cluster computes at a time."""
        return self.tile_m * self.cluster

    @property
    def partials_per_row(self) -> int:
        """Partial sums that a work tile writes for each row."""
        return 2 if self.pingpong else 1


@dataclass(frozen=True)
class KernelConfigs:
    """The configuration of each GEMM; only the first three are tuned."""

    project_exp: GemmConfig
    grad_hidden: GemmConfig | None = None
    """None for cuBLAS."""
    grad_weight: GemmConfig | None = None
    """None for cuBLAS and elementwise passes."""
    grad_hidden_short: GemmConfig | None = None
    """`grad_hidden` for windows of fewer columns than `SHORT`."""
    packed_sums: GemmConfig | None = None
    """The gradients' GEMMs that load and store sums; None if `grad_weight` is None."""
    exps: GemmConfig | None = None
    """The `project_exp` that stores exponentials without sums, and the one that keeps few entries
    beside sums; None for the same as of the others."""

    SHORT: ClassVar[int] = 1 << 15
