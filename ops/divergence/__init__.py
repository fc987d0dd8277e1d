"""Distillation: divergences of two heads, student and teacher, without the logits of either.

api.py           linear_divergence, and plan_divergence
checks.py        errors of their arguments
options.py       their options as records, which are the operators' arguments
operators.py     torch.ops.cutefce.divergence, and its derivative
flops.py         its formulas for torch's counter
problem.py       what is asked, and how it is laid out
steps.py         kinds of steps, and names of buffers
lower.py         a problem and a layout to a program
cost.py          the memory of single steps, and the time of a program
plan.py          the plan of a call: the fastest program within a budget
calls.py         forward and backward of a call, and which function runs which step
inputs.py        DivergenceInputs: what steps compute with
tiles.py         steps of tiles of both sides' logits: statistics, and factors
gradients.py     steps of the gradients of a side
sides.py         one side: its logits, and the factors of its gradients
logits.py        the kernel that makes logits
row_kernel.py    the kernel that takes whole rows of them
elementwise.py   the arithmetic of a tile
"""
