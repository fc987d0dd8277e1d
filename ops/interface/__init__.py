"""1. Call: from a user's arguments to the operators.

api.py             linear_cross_entropy: the names of torch
log_probs.py       linear_log_probs
kept_classes.py    its values among the classes that a sampler kept
module.py          LinearCrossEntropyLoss
plan.py            plan, backend_for, set_strict: how a call would run
positions.py       losses of K dimensions
probabilities.py   losses of probabilities of all classes
scalars.py         numbers as tensors
call.py            torch.ops.cutefce.loss: check, run
public_function.py what public functions do before their bodies, and with their errors
options.py         the table of options, and what every argument may be
checks.py          errors of one argument
heads.py           those of hidden states, weights and targets that do not fit together
soft_targets.py    those of soft targets, and of classes of outputs
"""
