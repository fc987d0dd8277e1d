"""Programs while they are made: steps in the order in which they run, and the lives of buffers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from cutefce.ops.program.steps import ARENAS, Buffer, Home, Program, Range, Step


class ProgramBuilder(ABC):
    """A program whose steps are emitted, first those of the forward."""

    def __init__(self, program: Program, *, brief: bool) -> None:
        self.program, self.brief = program, brief
        """A brief program has one of many equal steps: it serves to choose, not to run."""
        self.steps, self.count, self.times = program.forward, 0, 1

    @abstractmethod
    def scratch(self, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""

    @abstractmethod
    def is_output(self, name: str) -> bool:
        """Whether a buffer in the memory of a result is a part of that result."""

    def buffer(
        self, name: str, rows: int, columns: int, item: int, home: Home | None = None, at: int = 0
    ) -> str:
        """Name a buffer; where it is named again, it is as large as the larger one."""
        known = self.program.buffers.get(name)
        if known is None or (known.rows, known.columns) < (rows, columns):
            if known is not None:
                rows, columns = max(rows, known.rows), max(columns, known.columns)
            self.program.buffers[name] = Buffer(rows, columns, item, home, at)
        return name

    def emit(
        self,
        kind: Enum,
        reads: Sequence[str],
        writes: Sequence[str],
        rows: Range,
        columns: Range = (0, 0),
        **flags: bool,
    ) -> None:
        """Append a step, and the scratch that it asks for."""
        step = Step(kind, (*reads,), (*writes,), rows, columns, **flags, times=self.times)
        lives = self.program.lives
        self.steps.append(step)
        for name in (*step.reads, *step.writes):
            lives[name] = lives.get(name, (self.count, 0))[0], self.count
        size = self.scratch(step)
        if size:
            scratch = f"scratch {self.count}"
            self.program.buffers[scratch] = Buffer(1, size, 1, Home.OUTSIDE)
            lives[scratch] = self.count, self.count
        self.count += 1

    def some(self, ranges: Iterable[Range]) -> Iterator[Range]:
        """Yield ranges; in a brief program, of many the first, one for those between, and the last.

        Meanwhile `times` says how many of them a step is for.
        """
        every, times = [*ranges], self.times
        if self.brief and len(every) > 3:
            between = times * (len(every) - 2)
            for x, self.times in ((every[0], times), (every[1], between), (every[-1], times)):
                yield x
            self.times = times
        else:
            yield from every

    def finished(self) -> Program:
        """Return the program; what is returned lives until its end."""
        names = {name for step in self.program.steps() for name in step.writes}
        for name, buffer in self.program.buffers.items():
            is_result = buffer.home not in (None, *ARENAS, Home.OUTSIDE)
            if is_result and name in names and self.is_output(name):
                self.program.lives[name] = self.program.lives[name][0], self.count
        return self.program
