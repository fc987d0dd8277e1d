"""The kernels that can be compiled: each a frozen description, which is its key in the cache.

Nothing here needs the DSL.
"""

import dataclasses
import functools
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import Configs, GemmConfig
from cutefce.cute_kernels.problem import can_keep


def notes_of_forward(tokens: Any, rows: int) -> Any:
    """Return the size of the notes of `tokens`, `rows` a block; see `dsl`.

    Takes Python integers or a kernel's.
    """
    return 2 + (tokens + rows - 1) // rows


@dataclass(frozen=True)
class ProjectExp:
    """Exponentials of the logits: their row sums, or the exponentials themselves, or both."""

    arch: str
    dtype: str
    config: GemmConfig
    sums: bool
    """Whether it returns row sums."""
    store: bool
    """Whether it stores exponentials."""
    masked: bool = False
    """Whether it leaves out row blocks that are not noted."""


@dataclass(frozen=True)
class TargetLogit:
    """Row dots h_i · w_y, and zeros for the notes of the kernels that follow."""

    arch: str
    dtype: str

    WARPS: ClassVar[int] = 8
    """Warps of a thread block, each of which takes a row."""

    def zeros(self, tokens: int) -> int:
        """Return how many zeros its threads can write."""
        return -(-tokens // self.WARPS) * 32 * self.WARPS


@dataclass(frozen=True)
class Finish:
    """Partial sums to row sums and losses, and notes of the row blocks to store again."""

    arch: str
    rows: int
    """Rows of a row block."""


@dataclass(frozen=True)
class Forward:
    """The forward where nothing is stored: what `target_logit`, `sums` and `finish` do, at once."""

    arch: str
    dtype: str
    config: GemmConfig

    @property
    def target_logit(self) -> TargetLogit:
        """Its first part."""
        return TargetLogit(self.arch, self.dtype)

    @property
    def sums(self) -> ProjectExp:
        """Its second part."""
        return ProjectExp(self.arch, self.dtype, self.config, sums=True, store=False)

    @property
    def finish(self) -> Finish:
        """Its third part."""
        return Finish(self.arch, self.config.rows)

    def between(self, tokens: int, windows: int) -> int:
        """Return how many numbers of 4 bytes lie between its parts."""
        notes: int = notes_of_forward(tokens, self.config.rows)
        return tokens * (1 + windows * self.config.parts_of_window) + notes


@dataclass(frozen=True)
class Combine:
    """out_i = a_i (x_i + b_i t_{k_i}): the last step of dX, and s ⊙ h."""

    arch: str
    out: str
    x: str
    table: str | None
    """Dtype of t; None without the second term."""
    scaled: bool
    """Whether there is an a; 1 if not."""
    weighted: bool
    """Whether there is a b; 1 if not."""


@dataclass(frozen=True)
class Gradient:
    """A product of exponentials with the weight, or of their transpose with the hidden states."""

    arch: str
    dtype: str
    config: GemmConfig
    of: str
    """What it is the gradient of: "hidden" or "weight"."""
    final: bool
    """Whether it adds the targets' part and rounds; if not, it adds to float32 sums."""

    WARPS: ClassVar[int] = 8
    """Warps of a thread block that multiply."""

    def notes(self, clusters: int) -> int:
        """Return the size of its notes on `clusters` clusters; see `cute_kernels.dsl`."""
        return 1 if self.final else 1 + clusters * self.config.cluster * self.WARPS


@dataclass(frozen=True)
class AddTargets:
    """The targets' part, added to dW's sums."""

    arch: str
    dtype: str


Kernel = ProjectExp | Gradient | TargetLogit | Finish | Forward | Combine | AddTargets


@dataclass(frozen=True)
class KernelSet:
    """The kernels that one architecture, dtype and configuration need."""

    forward: Forward
    """The forward alone."""
    target_logit: TargetLogit
    sums: ProjectExp
    """The forward alone, of ranks that share it."""
    sums_and_exps: ProjectExp
    """The forward that keeps exponentials."""
    exps: ProjectExp
    """What the backward computes again."""
    noted_exps: ProjectExp
    """The repair of what the forward kept."""
    finish: Finish
    scale_rows: Combine
    """s_i h_i."""
    scale_sums: Combine
    """The same of float32 sums."""
    finish_dx: Combine
    """s_i (x_i - S_i W_y)."""
    finish_dx_part: Combine
    """The same, not rounded: one rank's part of a sum."""
    grad_hidden: Gradient | None
    """Adds to dX's sums; None: a plain product does."""
    grad_hidden_short: Gradient | None
    """The same, for few columns."""
    grad_weight: Gradient | None
    """dW at once; None: plain products, and what the portable path does with them."""
    grad_weight_sums: Gradient | None
    """Adds to dW's sums."""
    add_targets: AddTargets | None
    """Adds the targets' part to dW's sums."""

    OF_KEPT: ClassVar = (
        "sums_and_exps",
        "noted_exps",
        "scale_sums",
        "grad_weight_sums",
        "add_targets",
    )
    """Those of plans that store exponentials in the forward."""

    def all(self) -> list[Kernel]:
        """Return every kernel of the set that a call may launch."""
        unused = () if can_keep(self.sums.dtype) else self.OF_KEPT
        names = (field.name for field in dataclasses.fields(self) if field.name not in unused)
        found = (getattr(self, name) for name in names)
        return [kernel for kernel in found if kernel is not None]


def kernel_set(arch: Arch, dtype: str, configs: Configs) -> KernelSet:
    """Return the kernels that `dtype` needs on `arch` with `configs`."""
    project = functools.partial(ProjectExp, arch.name, dtype, configs.project_exp)
    hidden, short = (
        None if config is None else Gradient(arch.name, dtype, config, "hidden", final=False)
        for config in (configs.grad_hidden, configs.grad_hidden_short)
    )
    weight = weight_sums = add_targets = None
    if configs.grad_weight is not None:
        weight = Gradient(arch.name, dtype, configs.grad_weight, "weight", final=True)
        weight_sums = dataclasses.replace(weight, final=False)
        add_targets = AddTargets(arch.name, dtype)
    combine = functools.partial(Combine, arch.name, dtype)
    forward = Forward(arch.name, dtype, configs.project_exp)
    return KernelSet(
        forward=forward,
        target_logit=forward.target_logit,
        sums=forward.sums,
        sums_and_exps=project(sums=True, store=True),
        exps=project(sums=False, store=True),
        noted_exps=project(sums=False, store=True, masked=True),
        finish=forward.finish,
        scale_rows=combine(dtype, None, scaled=True, weighted=False),
        scale_sums=combine("float32", None, scaled=True, weighted=False),
        finish_dx=combine("float32", dtype, scaled=True, weighted=True),
        finish_dx_part=Combine(arch.name, "float32", "float32", dtype, scaled=True, weighted=True),
        grad_hidden=hidden,
        grad_hidden_short=short,
        grad_weight=weight,
        grad_weight_sums=weight_sums,
        add_targets=add_targets,
    )


def all_kernels(arch: Arch) -> list[Kernel]:
    """Return every kernel that can be chosen on `arch` where nothing was tuned, each once."""
    gradients = arch.gradient_configs() or (None,)
    sets = [
        kernel_set(arch, dtype, Configs(config, gradient, gradient))
        for dtype, config, gradient in product(arch.dtypes, arch.configs(), gradients)
    ]
    every = [kernel for s in sets for kernel in s.all()]
    return list(dict.fromkeys(every))
