"""2. Plan: how a problem is computed within a memory budget.  Pure Python, without torch.

planner.py              where the plan is made: strategy, window, columns kept, chunk
chunks/                 gradients in forward: chunks of tokens, and their plans
plan.py                 a plan, and families of plans
call_problem.py         what a call adds to its problem: copies of operands, a buffer for dW
time_model.py           where time is predicted
memory_model.py         where memory is predicted
sampled_memory.py       that of sampled gradients
step_memory.py          what single steps take of it
soft_memory.py          that of soft targets, and of the targets' part of dW
sample_sizes.py         entries that a token may keep, columns that its lse is estimated of
dw_aliasing.py          how many exponentials fit into dW's memory
divergence/             plans of divergences of two heads
"""
