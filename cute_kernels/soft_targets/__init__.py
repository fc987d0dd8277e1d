"""Kernels of soft targets, for all architectures.

soft_leads    the class of a token's largest probability, a warp a row
prepare_soft  the other classes, sorted, with coefficients, a warp a row
soft_logits   h_i · w_v of these classes v, a block a token
put_soft      their entries in the place of exponentials, a warp a row; or the same, and
              exponentials times factors of tokens, a block a row
"""
