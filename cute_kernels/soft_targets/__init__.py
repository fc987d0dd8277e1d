"""Kernels of soft targets, for all architectures.

soft_logits  h_i · w_v of the classes v of a token but its lead, a block a token
put_soft     their entries in the place of exponentials, a warp a row; or the same, and
             exponentials times factors of tokens, a block a row
"""
