"""A call that misses a kernel knows all that it launches, without launching anything."""

from typing import Any

import pytest
import torch

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.process_cache import reset
from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.support import kernel_models
from tests.support.layouts import SMALL_TILES
from tests.support.options import LOSSES
from tests.support.outputs import values_case

SIZES = 600, 64, 3000
CALLS: dict[str, dict[str, Any]] = {
    "everything kept": {"workspace": "max"},
    "least memory": {"workspace": "min"},
    "chunks": {"workspace": 1 << 20},
    "losses of tokens": {"reduction": "none"},
    "samples": {"gradient": "sampled", "samples": 16},
    "buffer": {"accumulate_into": torch.zeros(SIZES[2], SIZES[1])},
    "buffer, known upstream": {
        "accumulate_into": torch.zeros(SIZES[2], SIZES[1]),
        "grad_output": 1.0,
        "workspace": 1 << 20,
    },
}
"""Arguments of plain losses, beside which there are those of each option and kind of target."""
MAKE = {name: make for name, make in LOSSES.items() if "probabilities" not in name}


class Launches:
    """Kernels that calls ask for, of which the first one is missing."""

    def __init__(self) -> None:
        self.launched: dict[KernelSpec, None] = {}

    def __call__(self, kernel: KernelSpec) -> Any:
        """Return a model of the kernel; while a call is rehearsed, what launches nothing."""
        if jit_cache._thread.recorded is not None:
            return jit_cache.compiled(kernel)
        make, jit_cache._thread.make = jit_cache._thread.make, None
        if make is not None and not self.launched:
            make(kernel)
        self.launched[kernel] = None
        return kernel_models.model_of(kernel)


def serve(monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, list[KernelSpec]]:
    """Return what calls launch, and what they compile."""
    reset()  # a plan that has run had its kernels
    launches, built = Launches(), list[KernelSpec]()
    arch = arch_named("sm_90a")
    kernel_models.serve_calls(monkeypatch, arch, SMALL_TILES, selects=True, replacement=launches)
    monkeypatch.setattr(build, "missing", lambda kernels: list(dict.fromkeys(kernels)))
    monkeypatch.setattr(build, "build", built.extend)
    return launches, built


def test_a_forward_alone_compiles_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, built = serve(monkeypatch)
    x = LOSSES["plain"](*SIZES, dtype=torch.bfloat16)
    with torch.no_grad():
        x.loss(x.leaves)
    assert built and set(built) == set(launches.launched)


@pytest.mark.parametrize("classes", [None, 4])
@pytest.mark.parametrize("outputs", [("lse",), ("lse", "entropy", "argmax", "mean_logit")])
def test_log_probabilities_compile_what_they_launch(
    outputs: tuple[str, ...], classes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, built = serve(monkeypatch)
    x = values_case([], classes, *SIZES, outputs=outputs, dtype=torch.bfloat16)
    x.total(x.values(x.own.leaves)).backward()
    assert built and set(built) == set(launches.launched)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", [*MAKE, *CALLS])
def test_a_call_compiles_what_it_launches(
    name: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, built = serve(monkeypatch)
    x, more = MAKE.get(name, MAKE["plain"])(*SIZES, dtype=torch.bfloat16), CALLS.get(name, {})
    leaves = x.leaves
    leaves[1].requires_grad_(not frozen or "accumulate_into" in more)
    x.loss(leaves, **more).sum().backward()
    assert built, "the call had all kernels"
    assert set(built) == set(launches.launched)
