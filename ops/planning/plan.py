"""The plan of a call, and families of plans."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from cutefce.cute_kernels.problem import LOW_BITS


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    strategy: str
    """"windows", "gradients_in_forward" or "sampled"."""
    window: int
    """Vocabulary columns of a window.  Windows that use dW's memory have half as many or more.
    With gradients in forward, the last window of a chunk has up to `kept`; without `has_windows`
    this number is not used there."""
    aliased: int
    """Columns whose exponentials use dW's memory until the backward: the first ones, whole
    reference blocks."""
    kept: int
    """Columns after these whose exponentials have memory until the backward, or while a chunk is
    processed: whole reference blocks."""
    chunk: int
    """Tokens of a chunk, of which the last one may have fewer; all of them with "windows"."""
    grad_hidden: bool
    """Whether dX is computed."""
    grad_weight: bool
    """Whether dW is computed."""
    grad_bias: bool = False
    """Whether the gradient of the bias is computed."""
    vocab: int = 0
    """Vocabulary columns of this rank."""
    workspace_bytes: int = 0
    """Predicted peak memory beyond the inputs and the gradients."""
    seconds: float = 0.0
    """Predicted time of forward and backward; for comparing plans of one problem."""
    tokens: int = 0
    """Tokens that are computed."""
    low_bits: int = LOW_BITS[-1]
    """Bits of each of dW's sums over chunks beside the 16 in its memory."""
    hidden_bits: int | None = None
    """Bits of each of dX's sums over windows beside 16; None for float32."""
    adds_in_forward: bool = False
    """Whether gradients in forward add dW to the caller's buffer, with no sums of their own."""

    budget: int | None = field(default=None, compare=False)
    """Bytes that were asked for, if no plan takes as few."""

    @property
    def gradients(self) -> tuple[bool, bool, bool]:
        """Which of dX, dW and the bias' gradient are computed."""
        return self.grad_hidden, self.grad_weight, self.grad_bias

    @property
    def is_sampled(self) -> bool:
        """Whether gradients are formed of sampled exponentials."""
        return self.strategy == "sampled"

    @property
    def in_forward(self) -> bool:
        """Whether gradients are formed in the forward."""
        return self.strategy == "gradients_in_forward"

    @property
    def has_windows(self) -> bool:
        """Whether fewer than all columns have memory of their own for exponentials."""
        return self.kept < self.vocab

    def selected_tokens(self, tokens: int) -> int:
        """Return how many of `tokens` are selected at a time; chunks are whole multiples of it."""
        return self.chunk if self.in_forward else tokens

    def __str__(self) -> str:
        name, is_exact = self.strategy.replace("_", " "), not self.is_sampled
        cost = predicted(self.workspace_bytes, self.seconds, self.budget if is_exact else None)
        if self.is_sampled:
            more = "; fewer samples take less, another workspace does not"
            return f"{name} gradients: {cost}" + more * (self.budget is not None)
        vocab = max(self.vocab, 1)
        kept, aliased = min(self.kept / vocab, 1), self.aliased / vocab
        size = f"{kept:.0%} kept" + f", {aliased:.0%} in the memory of dW" * (aliased > 0)
        if self.grad_hidden or self.grad_weight:
            again = 1 - kept - aliased
            size += f", {again:.0%} computed again" * (again > 0.005)
        columns = str(min(self.window, vocab))
        if self.in_forward:
            size = f"chunks of {min(self.chunk, self.tokens)} tokens"
            columns = f"up to {self.kept}" if self.has_windows else str(vocab)
            if self.adds_in_forward:
                size += ", dW in the caller's buffer"
        return f"{name}, {size}, {columns} columns at a time: {cost}"


def predicted(workspace_bytes: int, seconds: float, budget: int | None) -> str:
    """Return what a plan prints of memory and time; `budget` are bytes that no plan is within."""
    time = f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
    text = f"{_size(workspace_bytes)}, {time} predicted"
    if budget is not None:
        text += f"; no plan takes as little as the workspace of {_size(budget)}"
    return text


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 1 << 20 else f"{count} bytes"


@dataclass(frozen=True)
class Family:
    """Plans of a problem, each one slower and smaller than the one before."""

    count: int
    plan: Callable[[int], Plan]

    def fastest(self, budget: int) -> Plan:
        """Return the fastest plan within `budget` bytes, or else the smallest one."""
        return self.plan(self._first_within(budget))

    def within(self, budget: int) -> list[Plan]:
        """Return the plans within `budget` bytes, and at least the smallest one."""
        return [self.plan(i) for i in range(self._first_within(budget), self.count)]

    def _first_within(self, budget: int) -> int:
        places = range(self.count - 1)
        return bisect_left(places, True, key=lambda i: self.plan(i).workspace_bytes <= budget)
