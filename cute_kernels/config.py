"""How `project_exp` is tiled: a frozen choice, printable, the same for every architecture."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProjectExpConfig:
    """One way to run `project_exp`."""

    tile_m: int
    """Rows (tokens) of a tile."""
    tile_n: int
    """Columns (vocabulary entries) of a tile."""
    cluster: int
    """Thread blocks of a cluster: each has rows of its own, all share a tile of the weight."""
    stages: int
    """Tiles of the inputs that are in flight."""
    pingpong: bool
    """Whether the two warpgroups take turns on tiles of their own, or share each tile."""
    group: int = 8
    """Row blocks that clusters walk side by side; their hidden states stay in the L2 cache."""

    def __str__(self) -> str:
        schedule = "ping-pong" if self.pingpong else "cooperative"
        return (
            f"{self.tile_m}x{self.tile_n} {schedule}, cluster {self.cluster}, {self.stages} stages"
        )

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

    project_exp: ProjectExpConfig
    grad_hidden: ProjectExpConfig | None
    """None for a plain product."""
    grad_weight: ProjectExpConfig
