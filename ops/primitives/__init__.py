"""4. Primitives: what the steps of programs launch, on the kernels and in plain torch.

interface.py               the steps to exponentials and the loss, with their formulas
gradient_interface.py      those from exponentials to gradients
dispatch.py                which implementation serves a call, and why
cute_projection.py         launches of the kernels: exponentials, row sums, loss
cute_gradients.py          launches of the kernels: dX and dW
cute_rowwise.py            launches of the kernels: row-wise steps of both
portable_projection.py     the same in torch
portable_gradients.py
row_selection.py           which tokens are computed
elementwise.py             arithmetic between the GEMMs, fused on a GPU
weighted_sum.py            Σ factor_i x_i over the rows of 16-bit operands; gathers of soft targets
"""
