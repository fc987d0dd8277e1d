"""The inner operators: what autograd, compilers and graph capture see of a call.

operators.py       schemas and implementations
meta.py            their fake implementations
autograd.py        the derivative of the loss
probabilities.py   losses of probabilities of all classes, and their derivative
operands.py        the operands of programs: tokens, targets, primitives
agreement.py       what ranks of a call must agree on
saved.py           what a forward saves for its backward
seed.py            draws the seed of random entries
plans.py           the plan of a call, made when its operator runs
flops.py           FLOP formulas for torch's counter
context.py         autocast, the current device, dispatch modes
"""
