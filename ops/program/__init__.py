"""3. Program: a call of the loss as steps over buffers, which one interpreter runs.

calls.py       forward and backward of a call
run.py         the interpreter: arenas, and a function for each step
inputs.py      operands and primitives
table.py       which function runs which step
views.py       buffers as matrices, factors of tokens
exponentials.py  steps of logits: sums, statistics, loss, exponentials, factors
hidden.py      steps of dX
weight.py      steps of dW and of the bias' gradient
problem.py     what is asked: sizes, gradients, what is known when
layout.py      how it is laid out: chunks of tokens, windows of classes, what lies in dW
steps.py       buffers, steps and programs
cost_model.py  what steps on the primitives of a call cost: their scratch, and the workspace
step_memory.py bytes that single steps take
emit.py        a program while it is made: its steps, and the lives of its buffers
lower.py       a problem and a layout of a loss to a program
place.py       offsets of buffers, and the memory that a program takes
predicted_time.py  the time that it takes
search.py      the fastest of layouts within a budget
plan.py        the plan of a loss
"""
