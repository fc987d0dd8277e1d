"""Per-token data of a call: O(N) tensors between the GEMMs, the home of options of the loss.

targets.py         targets, with the options of their losses
selection.py       the tokens that count, in their order, and back
partial_sums.py    row sums of parts of the classes
statistics.py      what a forward leaves of every token, and the losses made of it
coefficients.py    what a backward multiplies exponentials by
scaling.py         where these factors are applied
loss_parts.py      what losses are made of, when it is first used
loss_terms.py      coefficients of the loss of a token, from targets as given
target_rows.py     the targets' part of dW, in plain torch
blocks.py          blocks of rows
logit_map.py       from raw logits to the model's
packed_sums.py       Sums: in their own dtype, or in 24 or 20 bits
"""
