"""Sampled gradients: few entries of the softmax, chosen at random, in the place of all.

The loss is exact.  With p̂_iv = exp(u_iv - l̂_i), l̂ an estimate of lse, and θ = 1 / samples, an entry
(i, v) beside the target's is kept with probability q = min(1, p̂ / θ), and e_iv / q then takes the
place of e_iv in the gradients.  Its expectation is e_iv, whatever the estimate; where l̂ is lse, a
token expects to keep 1/θ entries or fewer.  The target's part is exact.

lse takes the place of an estimate below it.  That depends on the estimate and the logits, not on
what was kept, so that expectations stay as they are.

Kernels choose and multiply entries.  Where they cannot, gradients are exact.

sample_sizes.py  entries that a token may keep, columns that its lse is estimated of
random_bits.py   the random bits of entries
steps.py         the steps that sampled gradients add to those of programs
lower.py         a problem to a program
cost.py          the memory and the time of these steps
estimates.py     the row sums that log-sum-exps are estimated of
kernels.py       the other steps, and which function runs which step
estimate_classes.py  the classes that log-sum-exps are estimated of
"""
