"""Kernels of soft targets, for all architectures.

soft_logits   h_i · w_v of the soft targets v of a token, a block a token
put_soft      their entries in the place of exponentials, a warp a row
"""
