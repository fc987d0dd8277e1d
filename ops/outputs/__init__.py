"""Outputs of tokens: entropy, ranks, the largest classes.

needs.py           what they ask of programs and of kernels
rows.py            the rows of statistics that a REDUCE makes of them
reductions.py      entropy and others, from reductions of parts of the classes
top_classes.py     the classes of the largest logits, from those of blocks of classes
steps.py           what these launch, in plain torch, in Triton and on the kernels
triton_blocks.py   Triton's kernels of rows and of blocks of classes
memory.py          what combining parts and searching for the largest classes take
"""
