"""Which function runs which step of sampled gradients."""

from collections.abc import Callable
from enum import Enum

from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.sampling import estimates, kernels, portable
from cutefce.ops.sampling.steps import SampleKind

Run = Callable[[Call, Step], None]


def either(in_torch: Run, on_kernels: Run) -> Run:
    """Return what runs a step in plain torch, or on the kernels that serve a call."""

    def run(call: Call, s: Step) -> None:
        has_kernels = isinstance(call.inputs.primitives.projection, CuteProjection)
        (on_kernels if has_kernels else in_torch)(call, s)

    return run


SAMPLING: dict[Enum, Run] = {
    SampleKind.CHOOSE_CLASSES: estimates.choose_classes,
    SampleKind.GATHER_CLASSES: estimates.gather_classes,
    SampleKind.PLACE_TARGETS: estimates.place_targets,
    SampleKind.PROJECT_CLASSES: estimates.project_classes,
    SampleKind.ESTIMATE: either(portable.estimate, kernels.estimate),
    SampleKind.DECIDE: portable.decide,
    SampleKind.PROJECT_SAMPLES: portable.project_samples,
    SampleKind.SAMPLE: kernels.sample,
    SampleKind.SAMPLE_AGAIN: kernels.sample_again,
    SampleKind.FINISH_ENTRIES: kernels.finish_entries,
    SampleKind.LIST: kernels.list_entries,
    SampleKind.SPARSE_HIDDEN: kernels.sparse_hidden,
    SampleKind.SPARSE_WEIGHT: kernels.sparse_weight,
}
