"""One call of the loss, folder by folder, in the order in which it passes through them.

    interface/    1. the public functions; where a user error is raised: `checks.py`
    operators/    the operators that autograd and compilers see, and their derivatives
    program/      2. where the plan is made: `plan.py`
                  3. which steps follow, where their buffers lie, and what runs them
    primitives/   4. what steps launch, on the CuTe DSL kernels or in plain torch
    sampling/     sampled gradients: how entries of the softmax are chosen, and their products
    rows/         per-token data of all steps: targets, options, statistics, coefficients
    soft_targets/ K classes of each token: targets with probabilities, and classes of outputs
    divergence/   the call of two heads, linear_divergence, from its arguments to its steps
    parallel/     across ranks: vocabulary and tokens sharded over a process group

`docs/internals/architecture.md` lists every file.
"""
