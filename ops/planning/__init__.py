"""What plans share: budgets, devices, and the memory of single steps.  Without torch.

budget.py               budgets of memory, and what a plan prints of its cost
device.py               what a device does in a second
step_memory.py          what single steps of primitives take
"""
