"""The examples measure memory as the benchmarks do."""

import torch

from bench.harness import timing
from examples.training import peak_bytes


def test_peak_bytes_is_that_of_the_benchmarks() -> None:
    def call() -> None:
        x = torch.randn(1000)
        del x
        torch.randn(300).sum()

    call()
    assert peak_bytes(call, torch.device("cpu")) == timing.peak_bytes(call, "cpu") >= 4000
