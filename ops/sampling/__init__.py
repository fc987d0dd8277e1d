"""Sampled gradients: few entries of the softmax, chosen at random, in the place of all.

samples.py           how entries are chosen, and those that were
random_bits.py       the random bits of entries
estimate_classes.py  the classes that log-sum-exps are estimated of
interface.py         the steps of a forward and a backward
gradients.py         these in order: the forward that samples, and the gradients of the entries
portable.py          these steps in plain torch
kernels.py           these steps on the kernels
"""
