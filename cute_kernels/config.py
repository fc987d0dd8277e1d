"""How a problem is computed: frozen, printable configurations."""

from dataclasses import dataclass
from typing import ClassVar

from cutefce.cute_kernels.integers import ceil_div


@dataclass(frozen=True)
class WindowConfig:
    """How the host walks the vocabulary."""

    window: int
    """Columns whose exponentials exist at the same time: the paper's window size."""
    reference_block: int
    """Columns whose exponentials share a reference; divides `window`."""

    def __post_init__(self) -> None:
        check_multiple("window", self.window, self.reference_block)

    def half(self, window: int) -> int:
        """Return half of `window` columns, rounded up to whole reference blocks."""
        return ceil_div(window, 2 * self.reference_block) * self.reference_block


@dataclass(frozen=True)
class PortableTiles(WindowConfig):
    """A window walk whose logits are computed in tiles, for the portable path."""

    tile_columns: int
    """Columns of one tile of logits; divides `window`."""
    tile_rows: int
    """Rows of one tile of logits; with fewer tokens, a tile has more columns."""

    def __post_init__(self) -> None:
        check_multiple("window", self.window, self.tile_columns)
        check_multiple("tile_columns", self.tile_columns, self.reference_block)

    def columns(self, tokens: int) -> int:
        """Return the columns of a tile when there are `tokens` rows in all."""
        columns, area = self.tile_columns, self.tile_columns * self.tile_rows
        while 2 * columns <= self.window and 2 * columns * tokens <= area:
            columns *= 2
        return columns


def check_multiple(name: str, value: int, unit: int) -> None:
    """Raise ValueError unless `value` is a multiple of `unit`."""
    if value % unit:
        raise ValueError(f"{name}: got {value}, expected a multiple of {unit}")


@dataclass(frozen=True)
class GemmConfig:
    """One way to compute the tiles of a bᵀ; in `project_exp`, a is h and b is w."""

    tile_m: int
    """Rows of a thread block's tile."""
    tile_n: int
    """Columns of a tile."""
    cluster: int
    """Thread blocks of a cluster: each has rows of its own, all share a tile of b."""
    stages: int
    """Steps of the inner dimension that are in flight."""
    pingpong: bool
    """Hopper: whether the two warpgroups take turns on tiles of their own, or share each tile."""
    raster_group: int = 8
    """Row blocks that clusters walk side by side; their rows of a stay in the L2 cache."""
    two_cta: bool = False
    """Blackwell: whether the two thread blocks of a cluster multiply as one, each with half of b's
    tile, or each by itself with all of it."""
    poly_exp2_per_16: int = 0
    """Blackwell: of every 16 exponentials, how many are computed by multiplying and adding."""

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}"]
        parts += ["ping-pong"] * self.pingpong + ["two_cta"] * self.two_cta
        parts += [f"cluster {self.cluster}", f"{self.stages} stages"]
        parts += [f"{self.poly_exp2_per_16}/16 emulated"] * bool(self.poly_exp2_per_16)
        return ", ".join(parts)

    @property
    def rows(self) -> int:
        """Rows of a row block: what one cluster computes at a time."""
        return self.tile_m * self.cluster

    @property
    def partials_per_row(self) -> int:
        """Partial sums that a unit writes for each row."""
        return 2 if self.pingpong else 1


@dataclass(frozen=True)
class KernelConfigs:
    """One way to run each kernel that has a choice."""

    project_exp: GemmConfig
    grad_hidden: GemmConfig | None
    """None for a plain product."""
    grad_weight: GemmConfig | None
    """None for plain products and passes over their results."""
    grad_hidden_short: GemmConfig | None = None
    """The same as `grad_hidden`, for fewer columns than `SHORT`."""

    SHORT: ClassVar[int] = 1 << 15
