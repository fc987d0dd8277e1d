"""Blackwell kernels.

mainloop.py      TMA loads and tcgen05: tiles of a GEMM, from memory to tensor memory
project_exp.py   where logits become exponentials
"""
