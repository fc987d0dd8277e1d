"""Results of kernels that verification compares with float64 and with the portable path.

step.py          those of a step and its parts
samples.py       of sampled gradients
soft_targets.py  of the kernels of soft targets
divergences.py   of the kernel of divergences
"""
