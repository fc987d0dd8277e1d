"""Sampled gradients on models of the kernels: what is sampled again, memory, and limits."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.autotune_cache.defaults import PORTABLE_TILES
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import SelectRowsSpec
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.program.plan import planned
from cutefce.ops.sampling.kernels import unsupported_reason
from tests.ops.test_sampled import GREAT, SAMPLED, SHAPE, drawn, eager
from tests.support import sampled as model
from tests.support.backends import KERNELS
from tests.support.kernel_models import model_of
from tests.support.layouts import pinned_plan
from tests.support.memory import peaks
from tests.support.options import options_case
from tests.support.reference import random_case
from tests.support.sound_programs import check
from tests.support.tiers import rest_slow

HOPPER = arch_named("sm_90a")


serve = KERNELS["kernels of sm_90a"].serve


def assert_same_entries(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """Gradients differ by roundings to 16 bits, in which sums round differently at times."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1:], want[1:], strict=True):
        half_ulp = torch.finfo(a.dtype).eps / 2
        assert float((a.double() - b.double()).norm()) <= half_ulp * float(b.double().norm())


@pytest.mark.parametrize("columns", [4096, 20], ids=["exact lse", "estimated lse"])
def test_low_estimates_are_sampled_again(
    columns: int, small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lse as the estimate: the entries are those of calls with exact estimates."""
    serve(monkeypatch, small_tiles)
    x = options_case(["linear_bias"], *SHAPE, dtype=torch.bfloat16, logit_std=2.0)
    want = drawn(x)
    model.estimate_of(columns, monkeypatch)

    def low(lse: Tensor) -> Tensor:
        lse[::3] -= math.log(GREAT)
        return lse if columns > 333 else lse - 8

    model.change_estimates(low, monkeypatch)
    assert_same_entries(drawn(x), want)


def test_outputs_of_log_probs(small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy is a row reduction of the launch that samples: of the same entries as without it."""
    serve(monkeypatch, small_tiles)
    case, results = random_case(*SHAPE, dtype=torch.bfloat16), []
    for outputs in ((), ("entropy",)):
        h, w = case.h.clone().requires_grad_(), case.w.clone().requires_grad_()
        torch.manual_seed(3)
        values = cutefce.linear_log_probs(h, w, case.y, outputs=outputs, **SAMPLED)
        values.log_probs.sum().backward()
        assert h.grad is not None and w.grad is not None
        results.append((values.log_probs, h.grad, w.grad))
    assert_same_entries(results[1], results[0])
    exact = cutefce.linear_log_probs(case.h, case.w, case.y, outputs=("entropy",)).entropy
    assert exact is not None and values.entropy is not None
    torch.testing.assert_close(values.entropy.detach(), exact, rtol=1e-4, atol=1e-4)


def launches_nothing(kernel: KernelSpec) -> Any:
    """Return a launch that allocates nothing, and leaves results undefined but for indices."""
    return model_of(kernel) if isinstance(kernel, SelectRowsSpec) else lambda *_: None


@pytest.mark.parametrize("given", rest_slow([(64, 0.1), (64, 0.0), (256, 0.0)]))
@pytest.mark.parametrize("trained", rest_slow([(True, True), (True, False), (False, True)]))
def test_peak_memory_is_predicted(
    trained: tuple[bool, bool], given: tuple[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the host allocates between launches."""
    tokens, hidden, vocab = 2048, 1024, 16384
    samples, smoothing = given
    tiles = PORTABLE_TILES["cpu"]
    serve(monkeypatch, tiles, replacement=launches_nothing)
    case = random_case(tokens, hidden, vocab, dtype=torch.bfloat16, ignored=0)
    h, w = (x.requires_grad_(t) for x, t in zip((case.h, case.w), trained, strict=True))
    wanted = [x for x in (h, w) if x.requires_grad]

    options: dict[str, Any] = {"samples": samples, "label_smoothing": smoothing}
    options["gradient"] = "sampled"

    plan = cutefce.plan(h, w, **options)
    plan = planned(replace(plan.problem, device="cuda"), plan.layout)
    check(plan.program)

    def step() -> None:
        with pinned_plan(plan):
            torch.autograd.grad(eager(h, w, case.y, **options), wanted)

    step()
    (peak,) = peaks([step])
    peak -= sum(x.nbytes for x in wanted)
    assert abs(plan.workspace_bytes - peak) <= max(0.02 * peak, 1 << 20), (plan, peak)


def refused(problem: Problem, samples: int = 256, **tensors: Tensor) -> str:
    """Return why kernels cannot sample, "" if they can."""
    given = LossOptions(samples=samples), TensorOptions(**tensors)
    return unsupported_reason(problem, torch.device("meta"), *given) or ""


def test_what_kernels_cannot_index_is_named() -> None:
    p, index = Problem(8192, 4096, 131072, "bfloat16", "cuda", arch=HOPPER.name), torch.zeros(2, 2)
    assert not refused(p)
    assert refused(p, 4096).startswith("samples: got 4096")
    assert refused(replace(p, tokens=1 << 20)).startswith("input: got 1048576 tokens")
    assert refused(p, target_indices=index).startswith("target_indices: got several classes")
    served = [s for s in range(16, 4097) if not refused(p, s)]
    most = max(served)
    assert most > 2000
