"""The memory and the time of the steps of sampled gradients.

How many entries there are depends on the softmax.  Predicted are those of a flat one, which keeps
the most: `samples` of each token.
"""

from cutefce.ops.costs.device import Device
from cutefce.ops.costs.step_memory import tile_bytes
from cutefce.ops.program.cost_model import CostModel
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Program, Step
from cutefce.ops.sampling.lower import SampledLowering
from cutefce.ops.sampling.steps import SampleKind

CHOOSE = 32
"""Bytes of a class while the most frequent ones are found."""
SAMPLED_AGAIN = 28
"""Bytes of a token's target, order and references where it may be sampled again."""


class SampledCostModel(CostModel):
    """What programs of sampled gradients cost on the kernels."""

    def lower(self, p: LossProblem, x: Layout, *, brief: bool = False) -> Program:
        """Return the program of a call; a brief one is no shorter."""
        return SampledLowering(p, x, self, brief=False).lowered()

    def seconds(self, program: Program, device: Device) -> float:
        """Return the time of a program."""
        p, total = program.problem, super().seconds(program, device)
        product = 2 * p.tokens * p.hidden / device.flops
        sparse = p.tokens * p.samples * p.hidden * p.item / max(p.vocab, 1) / device.bytes
        for step in program.steps():
            columns = step.columns[1] - step.columns[0]
            match step.kind:
                case SampleKind.PROJECT_CLASSES | SampleKind.SAMPLE:
                    total += columns * product
                case SampleKind.SPARSE_HIDDEN | SampleKind.SPARSE_WEIGHT:
                    total += columns * sparse
        return total

    def scratch(self, p: LossProblem, x: Layout, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
        columns = step.columns[1] - step.columns[0]
        match step.kind:
            case SampleKind.CHOOSE_CLASSES:
                return CHOOSE * p.vocab * max(p.ranks, 1)
            case SampleKind.PROJECT_CLASSES:
                return tile_bytes(self.kernel_problem, self.tiles, p.tokens, columns)
            case SampleKind.SAMPLE_AGAIN:
                sums = self.partial_sums(p, p.tokens, p.vocab)
                return p.tokens * (SAMPLED_AGAIN + sums * p.sums)
        return super().scratch(p, x, step)
