"""The kernels that can be compiled: each a frozen description, which is its key in the cache.

Nothing here needs the DSL.
"""

import dataclasses
import functools
from dataclasses import dataclass
from itertools import product

from cutefce.cute_kernels.arch import Arch
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


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    target_logit: TargetLogit
    sums: ProjectExp
    """The forward alone."""
    sums_and_exps: ProjectExp
    """The forward that keeps exponentials."""
    exps: ProjectExp
    """What the backward computes again."""
    noted_exps: ProjectExp
    """The repair of what the forward kept."""
    finish: Finish
    scale_rows: Combine
    """s_i h_i."""
    finish_dx: Combine
    """s_i (x_i - S_i W_y)."""
    finish_dw: Combine
    """Adds the targets' part."""
    finish_dw_scaled: Combine
    """Adds the targets' part and multiplies by a unit."""


def kernel_set(arch: Arch, dtype: str, config: ProjectExpConfig) -> KernelSet:
    """Return the kernels that `config` and `dtype` need on `arch`."""
    project = functools.partial(ProjectExp, arch.name, dtype, config)
    combine = functools.partial(Combine, arch.name, dtype)
    return KernelSet(
        target_logit=TargetLogit(arch.name, dtype),
        sums=project(sums=True, store=False),
        sums_and_exps=project(sums=True, store=True),
        exps=project(sums=False, store=True),
        noted_exps=project(sums=False, store=True, masked=True),
        finish=Finish(arch.name, config.rows),
        scale_rows=combine(dtype, None, scaled=True, weighted=False),
        finish_dx=combine("float32", dtype, scaled=True, weighted=True),
        finish_dw=combine("float32", "float32", scaled=False, weighted=False),
        finish_dw_scaled=combine("float32", "float32", scaled=True, weighted=False),
    )


def all_kernels(arch: Arch) -> list[Kernel]:
    """Return every kernel that can be chosen on `arch`, each once."""
    sets = [kernel_set(arch, *pair) for pair in product(arch.dtypes, arch.configs())]
    every = [getattr(s, f.name) for s in sets for f in dataclasses.fields(s)]
    return list(dict.fromkeys(every))
