"""Which function runs which step of sampled gradients."""

from collections.abc import Callable
from enum import Enum

from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.sampling import estimates, kernels, portable
from cutefce.ops.sampling.steps import SampleKind

Table = dict[Enum, Callable[[Call, Step], None]]

PORTABLE: Table = {
    SampleKind.CHOOSE_CLASSES: portable.choose_classes,
    SampleKind.PLACE_TARGETS: portable.place_targets,
    SampleKind.ESTIMATE: portable.estimate,
    SampleKind.SAMPLE: portable.sample,
    SampleKind.FINISH_ENTRIES: portable.finish_entries,
    SampleKind.PUT_TERMS: portable.put_terms,
    SampleKind.LIST: portable.list_entries,
    SampleKind.SPARSE_HIDDEN: portable.sparse_hidden,
    SampleKind.SPARSE_WEIGHT: portable.sparse_weight,
}
KERNELS: Table = {
    SampleKind.CHOOSE_CLASSES: kernels.choose_classes,
    SampleKind.PLACE_TARGETS: kernels.place_targets,
    SampleKind.ESTIMATE: kernels.estimate,
    SampleKind.SAMPLE: kernels.sample,
    SampleKind.SAMPLE_AGAIN: kernels.sample_again,
    SampleKind.FINISH_ENTRIES: kernels.finish_entries,
    SampleKind.LIST: kernels.list_entries,
    SampleKind.SPARSE_HIDDEN: kernels.sparse_hidden,
    SampleKind.SPARSE_WEIGHT: kernels.sparse_weight,
}


def run(call: Call, s: Step) -> None:
    """Run a step on the kernels that serve a call, or in plain torch."""
    is_portable = call.inputs.primitives.projection.is_portable
    (PORTABLE if is_portable else KERNELS)[s.kind](call, s)


SAMPLING: Table = {
    **dict.fromkeys(SampleKind, run),
    SampleKind.GATHER_CLASSES: estimates.gather_classes,
    SampleKind.PROJECT_CLASSES: estimates.project_classes,
}
