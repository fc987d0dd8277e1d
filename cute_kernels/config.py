"""How a product is tiled: a frozen choice, printable, the same for every architecture."""

from dataclasses import dataclass
from typing import ClassVar


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
    group: int = 8
    """Row blocks that clusters walk side by side; their rows of a stay in the L2 cache."""
    paired: bool = False
    """Blackwell: whether the two thread blocks of a cluster multiply as one, each with half of b's
    tile, or each by itself with all of it."""
    emulated: int = 0
    """Blackwell: of every 16 exponentials, how many are computed by multiplying and adding."""

    def __str__(self) -> str:
        parts = [f"{self.tile_m}x{self.tile_n}"]
        parts += ["ping-pong"] * self.pingpong + ["paired"] * self.paired
        parts += [f"cluster {self.cluster}", f"{self.stages} stages"]
        parts += [f"{self.emulated}/16 emulated"] * bool(self.emulated)
        return ", ".join(parts)

    @property
    def rows(self) -> int:
        """Rows of a row block: what one cluster computes at a time."""
        return self.tile_m * self.cluster

    @property
    def parts_of_window(self) -> int:
        """Partial sums that a unit writes for each row."""
        return 2 if self.pingpong else 1


@dataclass(frozen=True)
class Configs:
    """One way to run each kernel that has a choice."""

    project_exp: GemmConfig
    grad_hidden: GemmConfig | None
    """None for a plain product."""
    grad_weight: GemmConfig | None
    """None for plain products and passes over their results."""
    grad_hidden_short: GemmConfig | None = None
    """The same as `grad_hidden`, for fewer columns than `SHORT`."""

    SHORT: ClassVar[int] = 1 << 15
