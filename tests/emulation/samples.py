"""Which entries `project_exp` samples, by the definition, and launches that sample."""

import math

import numpy as np
import torch

from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from tests.emulation.cases import Case, Launch
from tests.support.sampled import bits, row_states
from tests.support.sampling_models import MASK

SEED = torch.tensor([0x1234ABCD, 0xF00DCAFE - (1 << 32)], dtype=torch.int32)


class Sampled:
    """A launch of `project_exp` that samples, and what it should keep."""

    def __init__(
        self, case: Case, kernel: ProjectExpSpec, samples: int, capacity: int, shard_start: int = 7
    ) -> None:
        self.case, self.capacity = case, capacity
        tokens, vocab = len(case.y), len(case.w)
        u = case.others().numpy()
        self.estimate = np.logaddexp.reduce(u, 1)
        self.threshold = (self.estimate * math.log2(math.e) - math.log2(samples) - 32).astype("f4")
        self.threshold[case.y.numpy() < 0] = np.inf
        order = torch.arange(tokens)
        self.x = bits(SEED, order, torch.arange(vocab) + case.first + shard_start)
        self.u = u
        self.q = np.exp2(u * math.log2(math.e) - self.threshold[:, None] - 32.0)
        if kernel.transform.softcap:
            assert case.transform is not None and case.transform[0] is not None
            self.q *= np.maximum(1 - (u / case.transform[0][:, None]) ** 2, 0)
        self.launch: Launch = case.launch(kernel, vocab_splits=2)
        self.counts = np.zeros(tokens, np.int32)
        self.memory = np.full((tokens, capacity + 1), -1, np.int64)
        vectors = self.threshold, row_states(SEED, order).view(np.int32), self.counts
        self.entries = self.memory[:, :capacity]
        self.launch.samples = *vectors, self.entries, shard_start, order.numpy(), 0

    def check(self) -> None:
        """Compare the entries with the definition; rounding decides near the threshold."""
        distance = self.x / 2.0**32 - self.q
        near = np.abs(distance) <= 1e-5 * self.q + 2.0**-32
        assert near.mean() < 1e-3
        for row, (count, entries) in enumerate(
            zip(self.counts.tolist(), self.entries, strict=True)
        ):
            kept = np.flatnonzero((distance[row] < 0) & ~near[row])
            if len(kept) > self.capacity:
                assert count > self.capacity
                count = self.capacity
            else:
                assert len(kept) <= count <= len(kept) + near[row].sum()
            columns = (entries[:count] >> 32) - self.case.first
            assert len(set(columns.tolist())) == count, "no column twice"
            if count < self.capacity:
                assert set(kept.tolist()) <= set(columns.tolist())
            allowed = (distance[row] < 0) | near[row]
            assert allowed[columns].all()
            u = (entries[:count] & MASK).astype(np.uint32).view(np.float32)
            np.testing.assert_allclose(u, self.u[row, columns], rtol=1e-5, atol=1e-4)
        assert (self.memory[:, self.capacity] == -1).all(), "written beyond a row's slots"
