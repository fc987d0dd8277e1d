"""Plain steps, and their fused forwards and backwards, which these tests go with.

That such steps have the results of other steps is in `test_repeated_steps.py`.  Here is that
repeats are such steps, and what only their parts can show on small problems.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

import cutefce
from cutefce.ops import torch_compat
from cutefce.ops.interface import call_cache
from cutefce.ops.operators import kept, plain_step
from cutefce.ops.planning import window_layout
from cutefce.ops.primitives.fused import hidden_product
from cutefce.ops.primitives.fused import step as fused_step
from tests.support.reference import random_case
from tests.support.stand_in_gpu import forget, select_rows, served_by_kernels
from tests.support.steps import SOME, WORKSPACES, gradients, have_same_bits, operands, step
from tests.support.tiers import rest_slow

Launched = list[Any]


@pytest.fixture(autouse=True)
def kernels(device: str) -> Iterator[pytest.MonkeyPatch]:
    with served_by_kernels(device) as patch:
        yield patch


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, kernels: pytest.MonkeyPatch) -> Launched:
    """Return a list that grows with each launch of a fused step or of its product."""
    found: Launched = []
    compiled: Any = vars(fused_step)["compiled"]

    def note(kernel: Any) -> Any:
        def launch(*arguments: Any) -> None:
            found.append(kernel)
            compiled(kernel)(*arguments)

        return launch

    for module in (fused_step, hidden_product):
        monkeypatch.setattr(module, "compiled", note)
    return found


def entry() -> plain_step.PlainStep:
    (found,) = (x for x in call_cache._entries.values() if isinstance(x, plain_step.PlainStep))
    return found


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_repeats_are_plain_steps(
    workspace: int | str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that tests of repeats see them."""
    h, w, y = operands(device)
    forwards, forward = [], plain_step._forward

    def note(*arguments: Any) -> Any:
        forwards.append(arguments)
        return forward(*arguments)

    monkeypatch.setattr(plain_step, "_forward", note)
    for _ in range(3):
        step(h, w, y, workspace=workspace)
    assert len(forwards) == 2


@pytest.mark.parametrize(
    ("dtype", "workspace", "trained", "is_fused"),
    [
        (torch.bfloat16, "max", "hw", True),
        (torch.bfloat16, "min", "hw", True),
        (torch.bfloat16, SOME, "hw", True),
        (torch.float16, "min", "hw", False),
        (torch.bfloat16, "max", "h", False),
        (torch.bfloat16, "max", "w", False),
        (torch.float16, "max", "hw", False),
    ],
    ids=str,
)
def test_which_steps_are_fused(
    dtype: torch.dtype, workspace: Any, trained: str, is_fused: bool, device: str
) -> None:
    """Those that store exponentials of some columns for both gradients."""
    h, w, y = operands(device, dtype)
    h.requires_grad_("h" in trained)
    w.requires_grad_("w" in trained)
    step(h, w, y, workspace=workspace)
    assert (entry().fused is not None) == is_fused


def test_a_first_step_launches_what_a_repeat_does(device: str, launched: Launched) -> None:
    """So that a CUDA graph may be captured after one eager step."""
    given = operands(device)
    step(*given, workspace="max")
    first = {type(kernel).__name__ for kernel in launched}
    assert first >= {"FusedForwardSpec", "FusedBackwardSpec"}
    before = set(launched)
    step(*given, workspace="max")
    assert {x for x in launched if "Fused" in type(x).__name__} <= before


@pytest.mark.parametrize("reduction", rest_slow(["none", "mean"]))
def test_layouts_for_fewer_rows_have_the_results_of_other_steps(
    reduction: str, device: str, monkeypatch: pytest.MonkeyPatch, kernels: pytest.MonkeyPatch
) -> None:
    """Small problems have none unless they are made to."""
    select_rows(kernels, True)
    monkeypatch.setattr(window_layout, "EMPTY", 0)
    case = random_case(64, 64, 6000, dtype=torch.bfloat16, device=device, ignored=0)
    h, w, y = case.h.requires_grad_(), case.w.requires_grad_(), case.y
    order = torch.randperm(len(y), device=device)
    more: Any = {"workspace": 200 << 10, "reduction": reduction}
    targets = [y.index_fill(0, order[count:], -100) for count in (37, 36, 2, 0)]
    want = [step(h, w, each, **more) for each in targets]
    monkeypatch.setattr(window_layout, "EMPTY", 1000)
    monkeypatch.setattr(window_layout, "ROW_BLOCK", 4)
    forget()
    for each, exact in zip(targets, want, strict=True):
        call_cache.clear()
        results = []
        for _ in range(2):
            loss = cutefce.linear_cross_entropy(h, w, each, **more)
            results += [(loss, *gradients(loss, h, w, retain_graph=True)) for _ in range(2)]
        found = entry().fused
        assert found is not None and found.has_layouts
        with save_on_cpu():  # what the forward keeps is not found by a copy of the statistics
            loss = cutefce.linear_cross_entropy(h, w, each, **more)
        results.append((loss, *gradients(loss, h, w)))
        assert have_same_bits(*results)
        for got, a in zip(results[0][1:], exact[1:], strict=True):
            assert float((got - a).float().norm()) <= 2**-7 * float(a.float().norm())


def test_a_small_step_forms_dx_sums_in_its_forward(
    device: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, but for a second backward, whose bits are equal; larger steps form them later."""
    h, w, y = operands(device)
    results = []
    for small in (True, False):
        monkeypatch.setattr(hidden_product, "is_small", lambda *_, small=small: small)
        forget()
        step(h, w, y, workspace="max")
        launched.clear()
        loss = cutefce.linear_cross_entropy(h, w, y, workspace="max")
        assert count_of_products(launched) == small
        results += [(loss, *gradients(loss, h, w, retain_graph=True)) for _ in range(2)]
        assert count_of_products(launched) == 2 * small
    assert have_same_bits(*results)


def count_of_products(launched: Launched) -> int:
    return sum("Fused" not in type(kernel).__name__ for kernel in launched)


def test_other_backwards_free_the_workspace(
    device: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a graph that may be differentiated again, or in a capture, make sums of dX."""
    made, keep = list[Any](), kept.keep

    def note(stats: Tensor, results: Any) -> None:
        made.append(results)
        keep(stats, results)

    monkeypatch.setattr(kept, "keep", note)
    h, w, y = operands(device)
    want = step(h, w, y, workspace="max")
    for captured in (False, True):
        loss = cutefce.linear_cross_entropy(h, w, y, workspace="max")
        assert made[-1].workspace is not None
        launched.clear()
        if captured:
            monkeypatch.setattr(kept, "capture_id", lambda: 1)
        got = gradients(loss, h, w, create_graph=not captured)
        assert have_same_bits((loss, *got), want)
        assert made[-1].workspace is None and count_of_products(launched) == captured
    monkeypatch.setattr(torch_compat, "capture_id", lambda: 1)
    assert have_same_bits(step(h, w, y, workspace="max"), want)
    assert made[-1].workspace is None and count_of_products(launched) == 2  # each in a backward
