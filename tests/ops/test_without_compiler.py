"""First calls without a compiler, which run in plain torch."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cutefce
from cutefce.cute_kernels.jit.cache import CompilerError
from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.support.reference import ours, random_case
from tests.support.stand_in_gpu import served_by_kernels


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"gradient": "sampled"}], ids=str)
def test_a_compiler_that_fails_leaves_plain_torch(options: dict[str, Any]) -> None:
    tried: list[KernelSpec] = []

    def fail(kernel: KernelSpec) -> Callable[..., None]:
        tried.append(kernel)
        raise CompilerError(kernel, ValueError("no such target"))

    case = random_case(300, 16, 1000, dtype=torch.bfloat16)
    with served_by_kernels("cpu", fail):
        for _ in range(2):
            losses = ours(case, **options).loss
        assert len(tried) == 1
        backend = cutefce.backend_for(case.h, case.w)
    assert torch.equal(losses, ours(case, **options).loss)
    assert backend.name == "torch"
    assert backend.reason.endswith("the kernels' compiler failed: ValueError: no such target")


def test_threads_that_find_it_at_once_both_do_without() -> None:
    case, both = random_case(300, 16, 1000, dtype=torch.bfloat16), threading.Barrier(2, timeout=60)

    def fail(kernel: KernelSpec) -> Callable[..., None]:
        both.wait()
        raise CompilerError(kernel, ValueError("no such target"))

    with served_by_kernels("cpu", fail), ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(ours, case) for _ in range(2)]
        losses = [call.result().loss for call in calls]
    assert torch.equal(*losses)


def test_a_buffer_is_not_added_to_twice_without_a_compiler() -> None:
    def fail(kernel: KernelSpec) -> Callable[..., None]:
        raise CompilerError(kernel, ValueError("no such target"))

    case = random_case(300, 16, 1000, dtype=torch.bfloat16)
    h, w, buffer = case.h.requires_grad_(), case.w.requires_grad_(), torch.zeros_like(case.w)
    with served_by_kernels("cpu", fail), pytest.raises(CompilerError):
        cutefce.linear_cross_entropy(h, w, case.y, accumulate_into=buffer, grad_output=1.0)
