"""The steps of a divergence, and names of what they read and write."""

from enum import Enum

from cutefce.ops.divergence.options import SIDES
from cutefce.ops.program.steps import Home

DX, DW = (Home.DX, Home.SECOND_DX), (Home.DW, Home.SECOND_DW)
SUMS, STATS = 4, 7
"""Statistics of a token, of which the first ones make the log-sum-exps of both sides."""


class TileKind(Enum):
    """What a step does beside the `Kind` of losses; its rows are tokens, its columns are classes.

    Logits are a tile of both sides' in scratch.  To other steps, e are factors of trained sides.
    """

    __hash__ = object.__hash__

    ROWS = "all logits of tokens; statistics from these, and the factors that are kept"
    ADD_EXPS = "logits of some classes; their exponentials, added to those of log-sum-exps"
    FINISH_LSES = "log-sum-exps of all classes, those of other ranks too"
    ADD_TERMS = "logits of some classes; their terms, added to the divergences"
    COPY = "factors of kept tokens, next to those that are computed again"
    FACTORS = "logits of some classes; factors of the trained sides"


TILES = TileKind.ROWS, TileKind.ADD_EXPS, TileKind.ADD_TERMS, TileKind.FACTORS
"""Steps that make a tile of logits, which is what they write first."""


def side_of(name: str) -> int:
    """Return the side that a buffer is of."""
    return SIDES.index(name.split()[0])
