"""The kernel of divergences of two models' logits, for all architectures.

rows    rows of logits to their log-sum-exps, divergences and factors
terms   the arithmetic of a class
"""
