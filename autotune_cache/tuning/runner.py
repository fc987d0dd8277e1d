"""How configurations of the kernels run on one GPU, for verification and for the tuner."""

import functools
import itertools
from dataclasses import dataclass, replace

import torch

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.tuning.cases import (
    SMALL_PROBLEMS,
    Case,
    Outputs,
    compare,
    small_case,
)
from cutefce.autotune_cache.tuning.outputs import PrimitivesOf, outputs_of
from cutefce.autotune_cache.verdicts import ONCE, OPTIONS, PARTS
from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import PLAIN, KernelVariant
from cutefce.ops.primitives.dispatch import kernel_primitives
from cutefce.ops.primitives.primitives import Primitives

MANY_TOKENS, MANY_HIDDEN = 8192, 4096
"""Tokens and hidden size whose default configurations serve all kernels but the one that is tuned,
and calls with options."""
MAX_CPU_THREADS = 8
"""Threads for the small problems; more only wait for each other."""

Check = tuple[KernelConfigs, tuple[str, ...]]
"""A configuration, and the parts of calls that are checked in it."""


@dataclass(frozen=True)
class Runner:
    """One GPU; picklable."""

    gpu: Gpu
    device: str = "cuda"
    """The GPU, as torch names it."""

    def problem(self, sizes: tuple[int, int, int], dtype: str) -> Problem:
        """Return the problem of (tokens, hidden, vocab) on this GPU."""
        device = torch.device(self.device).type
        return Problem(*sizes, dtype, device, arch=self.gpu.arch.name)

    def base(self) -> KernelConfigs:
        """Return configurations of all kernels, in which one is replaced when it is tuned.

        They are the same for every problem, so that few kernels need compiling.
        """
        return self.gpu.default_configs(MANY_TOKENS, MANY_HIDDEN)

    def listed_configs(self) -> list[KernelConfigs]:
        """Return configurations with every listed one of each kernel at least once.

        The last one is of cuBLAS for dX beside a kernel of dW, as tables may have it.
        """
        listed = self.gpu.arch.listed
        found = [
            KernelConfigs(**{name: some[i % len(some)] for name, some in listed.items()})
            for i in range(max(map(len, listed.values())))
        ]
        if "grad_weight" in listed:
            found.append(replace(found[0], grad_hidden=None, grad_hidden_short=None))
        return found

    @process_cache
    def kernels(
        self, dtype: str, configs: KernelConfigs, parts: tuple[str, ...]
    ) -> tuple[KernelSpec, ...]:
        """Return the kernels that checks of the `parts` of calls launch.

        They run without data, and launch nothing.
        """
        with torch.device("cpu"), jit_cache.recording() as found:
            for name in SMALL_PROBLEMS:
                case = small_case(name, self.problem(SMALL_PROBLEMS[name], dtype))
                self.outputs(case.to("meta"), configs, parts)
        return tuple(found)

    def checks(self, parts: tuple[str, ...]) -> list[Check]:
        """Return what is checked: each part in all configurations, or in that of many tokens."""
        every, once = (tuple(x for x in parts if (x in ONCE) == is_once) for is_once in (0, 1))
        checks = [(configs, every) for configs in self.listed_configs() if every]
        return checks + [(self.base(), once)] * bool(once)

    def all_kernels(self, dtype: str, parts: tuple[str, ...]) -> list[KernelSpec]:
        """Return the kernels of parts of calls in all that is checked, each once."""
        every = (self.kernels(dtype, *check) for check in self.checks(parts))
        return list(dict.fromkeys(itertools.chain(*every)))

    def primitives(
        self, problem: Problem, configs: KernelConfigs, variant: KernelVariant = PLAIN
    ) -> Primitives:
        """Return the primitives on the kernels of `configs`, of calls with a variant."""
        kernels = kernel_set(self.gpu.arch, problem.dtype, configs, variant)
        return kernel_primitives(defaults.widest_window(problem), kernels, self.gpu.num_sms)

    @process_cache
    def _prepared(self, name: str, dtype: str, parts: tuple[str, ...]) -> tuple[Case, Outputs]:
        case = small_case(name, self.problem(SMALL_PROBLEMS[name], dtype))
        return case, self.expected(case, parts)

    def prepare(self, dtype: str, configs: KernelConfigs, parts: tuple[str, ...]) -> None:
        """Load kernels, and make inputs and expected outputs, which no check's time includes.

        It and `check` are for a subprocess.
        """
        torch.set_num_threads(min(MAX_CPU_THREADS, torch.get_num_threads()))
        self.use()
        for kernel in self.kernels(dtype, configs, parts):
            jit_cache.compiled(kernel)
        for name in SMALL_PROBLEMS:
            self._prepared(name, dtype, parts)

    def check(self, dtype: str, configs: KernelConfigs, parts: tuple[str, ...]) -> None:
        """Raise MismatchError if kernels of `configs` are wrong on a small problem."""
        for name in SMALL_PROBLEMS:
            case, expected = self._prepared(name, dtype, parts)
            compare(self.outputs(case.to(self.device), configs, parts), expected, name)

    def use(self) -> None:
        """Make its GPU the current one."""
        if self.device != "cpu":
            torch.cuda.set_device(self.device)

    def expected(self, case: Case, parts: tuple[str, ...]) -> Outputs:
        """Return what the portable path computes of the `parts` of calls, in float64 on the CPU."""
        exact = case.exact()
        return outputs_of(exact, lambda _: portable(exact.problem), parts)

    def outputs(self, case: Case, configs: KernelConfigs, parts: tuple[str, ...]) -> Outputs:
        """Return what the kernels of `configs` compute, under the same names."""
        own: PrimitivesOf = functools.partial(self.primitives, case.problem, configs)
        return outputs_of(case, own, parts)


def built_ahead(arch: Arch) -> list[KernelSpec]:
    """Return the kernels that are built ahead, each once: those of options are of one dtype."""
    runner = Runner(Gpu(arch, f"any of {arch.name}", num_sms=128))
    plain = tuple(part for part in PARTS if part != OPTIONS)
    parts = {dtype: plain for dtype in arch.dtypes} | {arch.dtypes[0]: PARTS}
    every = (runner.all_kernels(dtype, own) for dtype, own in parts.items())
    return list(dict.fromkeys(itertools.chain(*every)))


def portable(problem: Problem) -> Primitives:
    """Return the primitives of the portable path."""
    return Primitives(defaults.widest_window(problem))
