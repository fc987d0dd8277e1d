"""1. Call: from a user's arguments to the operators.

api.py             linear_cross_entropy, LinearCrossEntropyLoss: the names of torch; plan
call.py            torch.ops.cutefce.loss: check, run
options.py         the options as records: schema, checks, cache key
checks.py          where a user error is raised
context.py         autocast, the current device, dispatch modes
no_grad_cache.py   repeated no-grad calls: reuse the primitives
operators.py       schemas and implementations of the inner operators
meta.py            their fake implementations
plans.py           the plan of a call, made when its operator runs
kept.py            what a forward keeps for its backward
autograd.py        the derivative of the loss
flops.py           FLOP formulas for torch's counter
"""
