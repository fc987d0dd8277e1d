"""What runs the model that a head belongs to, where it looks for tensors in what a module returns.

They are found on the stack of calls: a head does not know what its model is wrapped in.
"""

from typing import Any

import torch

from cutefce.ops import torch_compat
from cutefce.ops.torch_compat import running_objects

DEEPSPEED = "deepspeed.runtime.engine"


@torch_compat.constant_in_graphs
def obstacle() -> str:
    """Return why the head itself must return logits, "" if it need not."""
    if any(True for _ in running_objects(torch_compat.PIPELINE_STAGE)):
        return "a stage of torch.distributed.pipelining"
    unit = next(running_objects(torch_compat.FSDP1), None)
    if unit is not None and not unit._is_root:
        return "FSDP1: a unit that is not the root"
    return ""


@torch_compat.constant_in_graphs
def looks_for_parameters() -> bool:
    """Whether DDP looks for parameters that the graphs of a model's outputs do not contain."""
    return any(x.find_unused_parameters for x in running_objects(torch_compat.DDP))


def deepspeed_engine() -> Any:
    """Return DeepSpeed's engine that runs now, None without one and in a compiled graph."""
    return None if torch.compiler.is_compiling() else next(running_objects(DEEPSPEED), None)
