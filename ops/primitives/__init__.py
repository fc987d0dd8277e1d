"""4. Primitives: what the steps of programs launch, on the kernels and in plain torch.

portable_projection.py     from hidden states to exponentials and the loss, in torch, with formulas
portable_gradients.py      those from exponentials to gradients
dispatch.py                which implementation serves a call, and why
cute_projection.py         launches of the kernels: exponentials, row sums, loss
cute_gradients.py          launches of the kernels: dX and dW
cute_rowwise.py            launches of the kernels: row-wise steps of both
triton_projection.py       from hidden states to exponentials on Triton's kernels
triton_gradients.py        those from exponentials to gradients
triton_kernels.py          Triton: exponentials
triton_blocks.py           Triton: logits of the blocks of classes that tokens choose
triton_rows.py             Triton: what is done to rows between GEMMs, and to their results
triton_weight.py           Triton: products of dW, which it rounds or keeps
primitives.py              one implementation of both
select_rows.py             selects the tokens that are computed, and moves their rows
elementwise.py             arithmetic between the GEMMs, fused on a GPU
weighted_sum.py            Σ factor_i x_i over the rows of 16-bit operands; gathers of soft targets
"""
