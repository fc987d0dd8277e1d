"""Which function runs which step, on the primitives that serve a call."""

from collections.abc import Callable
from enum import Enum

from cutefce.ops.program import exponentials, hidden, weight
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Kind, Step
from cutefce.ops.sampling.kernels import SAMPLING


def nothing(call: Call, s: Step) -> None:
    """Do nothing: what the step says is done with another one."""


TABLE: dict[Enum, Callable[[Call, Step], None]] = {
    Kind.SELECT: nothing,
    Kind.CLASS_ROW: nothing,
    Kind.GATHER: exponentials.gather,
    Kind.TARGET_LOGIT: exponentials.target_logit,
    Kind.ALL_REDUCE: exponentials.all_reduce,
    Kind.ALL_GATHER: exponentials.all_gather,
    Kind.CLEAR: exponentials.clear,
    Kind.PROJECT: exponentials.project,
    Kind.REDUCE: exponentials.reduce,
    Kind.LOSS: exponentials.finish_loss,
    Kind.COEFFICIENTS: exponentials.coefficients,
    Kind.ENTRIES: exponentials.entries,
    Kind.SCALE_EXPS: exponentials.scale_exps,
    Kind.LIST_TARGETS: weight.list_targets,
    Kind.GEMM_HIDDEN: hidden.gemm_hidden,
    Kind.GEMM_WEIGHT: weight.gemm_weight,
    Kind.BIAS: weight.bias,
    Kind.RESCALE: hidden.rescale,
    Kind.KEEP_HIDDEN: hidden.keep_hidden,
    Kind.FINISH_HIDDEN: hidden.finish_hidden,
    Kind.FINISH_WEIGHT: weight.finish_weight,
    Kind.FINISH_BIAS: weight.finish_bias,
    **SAMPLING,
}
"""What an operator has done before: SELECT and CLASS_ROW, whose results are among the inputs."""
