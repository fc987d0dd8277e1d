"""3. Strategy: the order of the steps of a forward and a backward.

loss_inputs.py            operands and primitives
windows.py                iterate over vocabulary windows, store or recompute their exponentials
gradients_in_forward.py   form gradients in the forward, a chunk of tokens at a time
chunk_windows.py          windows inside these chunks, where only dX is formed
soft_entries.py           terms of soft targets among exponentials
sampled.py                sample the exponentials that gradients are formed of
weight_gradient.py        rows of dW, written or added to a buffer of the caller's
bias_gradient.py          the end of the bias' gradient
weight_sums.py            sums of dW over chunks of tokens
hidden_gradient.py        sums of dX over windows
hidden_sums.py            sums of dX from the forward to the backward
dw_views.py               exponentials in the memory of dW
"""
