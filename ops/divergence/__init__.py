"""Distillation: divergences of two heads, student and teacher, without the logits of either.

api.py           linear_divergence, and plan_divergence
checks.py        errors of their arguments
options.py       their options as records, which are the operators' arguments
operators.py     torch.ops.cutefce.divergence, and its derivative
flops.py         its formulas for torch's counter
problem.py       what is asked, and how it is laid out
steps.py         kinds of steps, names of buffers, and what steps take
lower.py         a problem and a layout to a program
plan.py          the plan of a call: the fastest program within a budget
inputs.py        DivergenceInputs: what steps compute with
calls.py         forward and backward of a call; steps of gradients
tiles.py         steps of tiles of both sides' logits: statistics, and factors
kernels.py       launches for logits, and for whole rows of them
elementwise.py   the arithmetic of a tile
"""
