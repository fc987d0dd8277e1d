"""The steps that sampled gradients add to those of programs."""

from enum import Enum


class SampleKind(Enum):
    """What a step does; its rows are tokens, its columns are classes.

    With the symbols of this folder: l̂ is an estimate of lse, q the probability of an entry.
    """

    __hash__ = object.__hash__

    ESTIMATE = "l̂ of each row, of row sums of e over some classes, this rank's share of all ranks'"
    SAMPLE = "row sums of e over all columns, and the entries that l̂ keeps"
    FINISH_ENTRIES = "e / q of each entry that lse keeps, of rows without room for those of l̂ too"
    LIST = "the entries of each class"
    SPARSE_HIDDEN = "Σ e / q w of each row: dX"
    SPARSE_WEIGHT = "Σ e / q h of each column: dW, and the bias' gradient"
