"""What plans are compared by, without torch.  `ops.program.plan` makes the plans.

budget.py       budgets of memory, and what a plan prints of its cost
device.py       what a device does in a second
step_memory.py  the bytes that single steps of primitives take, and the blocks that they work in
"""
