"""Runs programs: the only interpreter.

What steps exchange lies in arenas, or in the memory of gradients, where `place` has put it.  Values
of tokens alone, such as statistics and factors, are tensors of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.program.inputs import LossInputs
from cutefce.ops.program.steps import Home, Program, Range, Step
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.scaling import Scaling
from cutefce.ops.torch_compat import capture_id


@dataclass
class SavedMemory:
    """The memory that a forward saves for a backward.

    It has no inputs, and not the statistics, by which a backward finds it.
    """

    program: Program
    by_home: dict[Home, Tensor]
    capture: int | None = field(default_factory=lambda: capture_id())
    """The CUDA graph capture in which the forward ran; None if in none."""
    is_replayed: bool = False
    """Whether a CUDA graph replays the forward or a backward without the other: replays read this
    memory, so that each backward overwrites a copy."""

    def take(self) -> dict[Home, Tensor] | None:
        """Return the memory; later backwards get None of what this one overwrites.

        The dictionary is the caller's: threads may share a graph.
        """
        if not self.program.is_spent:
            return dict(self.by_home)
        if self.capture != capture_id():
            self.is_replayed = True
        memory: dict[Home, Tensor] | None
        if self.is_replayed:
            memory = vars(self).get("by_home")
            return None if memory is None else {home: x.clone() for home, x in memory.items()}
        memory = vars(self).pop("by_home", None)  # in one step
        return memory


class Inputs(Protocol):
    """What a call is given, seen from the interpreter."""

    @property
    def h(self) -> Tensor:
        """A tensor on the device of the call."""


InputsT = TypeVar("InputsT", bound=Inputs)


@dataclass
class Interpreter(Generic[InputsT]):
    """What one call of a program computes with, and what its steps have found."""

    program: Program
    inputs: InputsT
    memory: dict[Home, Tensor] = field(default_factory=dict)
    """Of arenas and gradients."""
    values: dict[str, Any] = field(default_factory=dict)

    def run(self, steps: Sequence[Step], scratch: Home, table: Mapping[Any, Any]) -> None:
        """Run steps with memory of their own for scratch."""
        self.allocate(scratch)
        for step in steps:
            table[step.kind](self, step)
        self.memory.pop(scratch, None)

    def allocate(self, home: Home) -> None:
        """Allocate an arena, if it has buffers: a GPU's host takes microseconds for it."""
        if home in self.program.homes:
            h = self.inputs.h
            self.memory[home] = h.new_empty(self.program.arenas[home] // h.dtype.itemsize)

    def dtype_of(self, item: int) -> torch.dtype:
        """Return the dtype of elements of `item` bytes."""
        dtype = self.inputs.h.dtype
        if item == dtype.itemsize:
            return dtype
        return torch.uint8 if item == 1 else sum_dtype(dtype)


@dataclass
class Call(Interpreter[LossInputs]):
    """A call of a loss."""

    parts: dict[Range, LossInputs] = field(default_factory=dict)
    views: dict[tuple[str, int | None], Tensor] = field(default_factory=dict)
    """Buffers as matrices."""

    def part(self, rows: Range) -> LossInputs:
        """Return the operands of some tokens, whose losses are not reduced."""
        if not self.program.in_chunks:
            return self.inputs
        found = self.parts.get(rows)
        if found is None:
            x, tokens = self.inputs, slice(*rows)
            own = x.h if x.targets.selection is not None else x.h[tokens]
            primitives, targets = x.primitives.behind(rows[0]), x.targets.per_token(tokens)
            found = replace(x, primitives=primitives, h=own, targets=targets)
            found.targets.class_row = x.targets.class_row
            if found.targets.selection is not None:
                found.targets.selection = found.targets.selection.skipping()
            self.parts = {rows: found}
        return found

    def view(self, name: str, columns: int | None = None) -> Tensor:
        """Return a buffer as a matrix, or its first `columns`: the same tensor each time."""
        found = self.views.get((name, columns))
        if found is None:
            b = self.program.buffers[name]
            assert b.home is not None
            found, dtype = self.memory[b.home], self.dtype_of(b.item)
            if found.dtype != dtype:
                found = found.view(-1).view(dtype)
            size = b.rows, b.columns if columns is None else columns
            if found.shape != size:
                found = found.as_strided(size, (b.columns, 1), b.offset // b.item)
            self.views[name, columns] = found
        return found

    def rows(self, s: Step, name: str, columns: int | None = None) -> Tensor:
        """Return the rows of a buffer of a chunk that a step has."""
        view = self.view(name, columns)
        return view[: s.rows[1] - s.rows[0]] if self.program.in_chunks else view

    def states(self, s: Step) -> Tensor:
        """Return the hidden states that a step reads."""
        return self.part(s.rows).h if s.states is None else self.rows(s, s.states)

    def exps(self, s: Step, *, whole: bool = False) -> Tensor:
        """Return the exponentials of a step's columns, or `whole` ones with those of no class."""
        assert s.exps is not None
        columns = s.columns[1] - s.columns[0]
        if whole:
            block = self.program.problem.block
            columns = min(round_up(columns, block), self.program.buffers[s.exps].columns)
        return self.rows(s, s.exps, columns)

    def scale(self) -> Tensor | None:
        """Return the factors of hidden states beside exponentials; None if these have them."""
        scaling: Scaling = self.values["scaling"]
        scale = scaling.row_scale if scaling.row_scale is not None else scaling.relative
        factor = self.values.get("known")
        return scale if scale is None or factor is None else scale * factor

    def sums(self, names: Sequence[str], low_bits: int | None = None) -> Sums:
        """Return sums of a buffer, or packed ones of two, of which the second has their low bits.

        These are as many as those of sums over windows or of dW, or `low_bits`.
        """
        upper, *low = map(self.view, names)
        columns = self.inputs.h.shape[1] * (low_bits or self.program.low_bits) // 8
        return Sums(upper, low[0][:, :columns] if low else None)
