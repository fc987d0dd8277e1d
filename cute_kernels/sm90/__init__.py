"""Hopper kernels.

mainloop.py         TMA loads and wgmma: tiles of a GEMM, from memory to registers
project_exp.py      where logits become exponentials
gradient.py         where dW is written; dX's sums
epilogue_store.py   registers to memory, by TMA
kept_store.py       registers added to sums of 20 or 24 bits in memory
"""
