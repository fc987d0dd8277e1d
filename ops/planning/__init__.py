"""2. Plan: how a problem is computed within a memory budget.  Pure Python, without torch.

planner.py         where the plan is made: strategy, window, columns kept, chunk
memory_model.py    where memory is predicted
dw_aliasing.py     how many exponentials or sums fit into a gradient's memory
"""
