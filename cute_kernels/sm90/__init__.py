"""Hopper kernels.

mainloop.py              TMA loads and wgmma: tiles of a GEMM, from memory to registers
project_exp.py           where logits become exponentials, or are stored in float32
gradient.py              where dW is written; dX's sums
target_terms.py          what tokens add to dW in the rows of their targets
epilogue_store.py        registers to memory, by TMA
packed_store.py            registers added to sums of 16 to 32 bits in memory
"""
