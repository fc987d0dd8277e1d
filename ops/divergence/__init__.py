"""Distillation: divergences of two heads, student and teacher, without the logits of either.

api.py           linear_divergence
plan.py          plan_divergence, and the problem of a call
checks.py        errors of its arguments
options.py       its options as records, which are the operators' arguments
operators.py     torch.ops.cutefce.divergence, and its derivative
flops.py         its formulas for torch's counter
passes.py        the passes over tiles of both sides' logits
factors.py       the factors that the forward keeps
sides.py         one side's logits, and the sums of its gradients
logits.py        the kernel that makes these
row_kernel.py    the kernel that takes whole rows of them
elementwise.py   the arithmetic of a tile
"""
