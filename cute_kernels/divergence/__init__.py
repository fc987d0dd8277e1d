"""The kernel of divergences of two models' logits, for all architectures.

rows           rows of logits to their log-sum-exps, divergences and factors
log_sum_exps   log-sum-exps of rows, of logits or of partial sums
terms          the arithmetic of a class
"""
