"""The kernels that can be compiled: each a frozen description, which is its key in the cache.

Nothing here needs the DSL.
"""

from dataclasses import dataclass
from itertools import product

from cutefce.cute_kernels.arch import Sm90
from cutefce.cute_kernels.config import ProjectExpConfig


@dataclass(frozen=True)
class ProjectExp:
    """Exponentials of the logits: their row sums, or the exponentials themselves, or both."""

    arch: str
    dtype: str
    config: ProjectExpConfig
    sums: bool
    """Whether it returns row sums."""
    store: bool
    """Whether it stores exponentials."""
    masked: bool = False
    """Whether it leaves out row blocks that are not noted."""


@dataclass(frozen=True)
class TargetLogit:
    """Row dots h_i · w_y."""

    arch: str
    dtype: str


@dataclass(frozen=True)
class Finish:
    """Partial sums to row sums and losses, and notes of the row blocks to store again."""

    arch: str
    rows: int
    """Rows of a row block."""


@dataclass(frozen=True)
class Combine:
    """out_i = a_i (x_i + b_i t_{k_i}): the last step of dX, dW and s ⊙ h."""

    arch: str
    out: str
    x: str
    table: str | None
    """Dtype of t; None without the second term."""
    scaled: bool
    """Whether there is an a; 1 if not."""
    weighted: bool
    """Whether there is a b; 1 if not."""


Kernel = ProjectExp | TargetLogit | Finish | Combine

VARIANTS = ((True, False, False), (False, True, False), (True, True, False), (False, True, True))
"""(sums, store, masked) of the `ProjectExp` kernels in use: the forward alone and what the backward
computes again; then, not for float16, the forward that keeps exponentials and their repair."""


def scale_rows(arch: str, dtype: str) -> Combine:
    """Return the kernel of s_i h_i."""
    return Combine(arch, dtype, dtype, None, scaled=True, weighted=False)


def finish_dx(arch: str, dtype: str) -> Combine:
    """Return the kernel of s_i (x_i - S_i W_y)."""
    return Combine(arch, dtype, "float32", dtype, scaled=True, weighted=True)


def finish_dw(arch: str, dtype: str, scaled: bool) -> Combine:
    """Return the kernel that adds the targets' part to dW, and multiplies by a unit if `scaled`."""
    return Combine(arch, dtype, "float32", "float32", scaled=scaled, weighted=False)


def all_kernels(arch: Sm90) -> list[Kernel]:
    """Return every kernel that can be chosen on `arch`."""
    kernels: list[Kernel] = []
    for dtype, config, variant in product(arch.dtypes, arch.configs(), VARIANTS):
        if dtype == "float16" and variant in VARIANTS[2:]:
            continue
        kernels.append(ProjectExp(arch.name, dtype, config, *variant))
    for dtype in arch.dtypes:
        kernels.append(TargetLogit(arch.name, dtype))
        kernels += [scale_rows(arch.name, dtype), finish_dx(arch.name, dtype)]
        kernels += [finish_dw(arch.name, dtype, scaled) for scaled in (False, True)]
    kernels += [Finish(arch.name, rows) for rows in sorted({c.rows for c in arch.configs()})]
    return kernels
