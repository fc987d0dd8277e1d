"""1. Call: from a user's arguments to the operators.

api.py             linear_cross_entropy: the names of torch
log_probs.py       linear_log_probs
module.py          LinearCrossEntropyLoss
plan.py            plan, backend_for, set_strict: how a call would run
positions.py       losses of K dimensions
probabilities.py   losses of probabilities of all classes
scalars.py         numbers as tensors
call.py            torch.ops.cutefce.loss: check, run
options.py         the options as records: schema, checks
checks.py          where a user error is raised
option_checks.py   those of the options of a loss
soft_targets.py    those of soft targets, and of classes of outputs
"""
