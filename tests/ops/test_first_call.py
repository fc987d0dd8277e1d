"""A call that misses a kernel knows all that it launches, without launching anything."""

from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.process_cache import reset
from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.support import kernel_models
from tests.support.layouts import SMALL_TILES

N, D, V = 600, 64, 3000
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything kept": {"workspace": "max"},
    "least memory": {"workspace": "min"},
    "chunks": {"workspace": 1 << 20},
    "losses of tokens": {"reduction": "none"},
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-3, "token_weights": torch.rand(N)},
    "logit map": {"softcap": 20.0, "logit_scale": 0.5, "linear_bias": torch.randn(V)},
    "soft targets": {
        "target_indices": torch.randint(V, (N, 4)),
        "target_probs": torch.full((N, 4), 0.25),
    },
    "samples": {"gradient": "sampled", "samples": 16},
    "weights of classes": {"weight": torch.rand(V), "denominator": 7.0},
    "temperatures": {"temperature": torch.rand(N) + 0.5},
    "buffer": {"accumulate_into": torch.zeros(V, D)},
    "buffer, known upstream": {
        "accumulate_into": torch.zeros(V, D),
        "grad_output": 1.0,
        "workspace": 1 << 20,
    },
}


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
    h, w, y = torch.randn(N, D).bfloat16(), torch.randn(V, D).bfloat16(), torch.randint(V, (N,))
    cutefce.linear_cross_entropy(h, w, y)
    assert built and set(built) == set(launches.launched)


@pytest.mark.parametrize("classes", [None, 4])
@pytest.mark.parametrize("outputs", [("lse",), ("lse", "entropy", "argmax", "mean_logit")])
def test_log_probabilities_compile_what_they_launch(
    outputs: tuple[str, ...], classes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, built = serve(monkeypatch)
    h, w = torch.randn(N, D).bfloat16().requires_grad_(), torch.randn(V, D).bfloat16()
    w.requires_grad_()
    given: dict[str, Any] = {"target": torch.randint(V, (N,))}
    if classes:
        given = {"target_indices": torch.randint(V, (N, classes))}
    found = cutefce.linear_log_probs(h, w, **given, outputs=outputs)
    loss = found.log_probs.sum()
    if found.entropy is not None:
        loss = loss + found.entropy.sum()
    loss.backward()
    assert built and set(built) == set(launches.launched)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_compiles_what_it_launches(
    name: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, built = serve(monkeypatch)
    h, w = torch.randn(N, D).bfloat16().requires_grad_(), torch.randn(V, D).bfloat16()
    more = dict(CALLS[name])
    w.requires_grad_(not frozen or "accumulate_into" in more)
    y = None if "target_probs" in more else torch.randint(V, (N,))
    if "linear_bias" in more:
        more["linear_bias"] = more["linear_bias"].bfloat16()
    loss = cutefce.linear_cross_entropy(h, w, y, **more)
    loss.sum().backward()
    assert built, "the call had all kernels"
    assert set(built) == set(launches.launched)
