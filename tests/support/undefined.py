"""Programs whose memory is NaN where no buffer lives."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cutefce.ops.program.run import Interpreter
from cutefce.ops.program.steps import Home, Step

UNDEFINED = 255
"""The byte of which NaN is made, in every dtype."""


def allocate(call: Interpreter[Any], home: Home) -> None:
    """Allocate an arena in which nothing is defined."""
    size = call.program.arenas[home]
    call.memory[home] = call.inputs.h.new_empty(size, dtype=torch.uint8)
    clear(call.memory[home])


def clear(x: Tensor, first: int = 0, last: int | None = None) -> None:
    """Fill bytes of memory, which nobody who watches a call sees."""
    with _disable_current_modes():
        x[first:last].fill_(UNDEFINED)


def run(
    call: Interpreter[Any], steps: Sequence[Step], scratch: Home, table: Mapping[Any, Any]
) -> None:
    """Do what `Interpreter.run` does; clear each buffer after the last step that names it."""
    program = call.program
    call.allocate(scratch)
    start = len(program.forward) if steps is program.backward else 0
    for number, step in enumerate(steps, start):
        table[step.kind](call, step)
        for name in {*step.reads, *step.writes}:
            buffer, last = program.buffers[name], program.lives[name][1]
            if last == number and buffer.home is scratch:
                clear(call.memory[scratch], buffer.offset, buffer.end)
    del call.memory[scratch]


def make_undefined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs run on such memory."""
    monkeypatch.setattr(Interpreter, "allocate", allocate)
    monkeypatch.setattr(Interpreter, "run", run)
