"""A call of the loss as one program: steps over buffers, which one interpreter will run.

    problem.py     what is asked: sizes, gradients, what is known when
    layout.py      how it is laid out: chunks of tokens, windows of classes, what lies in dW
    steps.py       buffers, steps and programs
    backend.py     what lowering must know of those who run the steps
    kernel_backend.py  the kernels, as such
    lower.py       a problem and a layout to a program
    place.py       offsets of buffers, the memory that a program takes, and what forbids overlap
    cost.py        the time that it takes
    plan.py        the fastest program within a budget

`planning` and `strategies` run calls until the interpreter does.
"""
