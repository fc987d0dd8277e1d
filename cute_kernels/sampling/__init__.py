"""The kernels of sampled gradients but for the sampling itself, for all architectures.

    prepare_samples   thresholds and hashes of rows from an estimate of their log-sum-exp; a thread
                      a row, a warp an estimate
    sort_samples      a row's entries, which `project_exp` has appended, by column; a block a row
    list_samples      the entries of every class, in the order of tokens: a sparse transpose
    sparse_rows       Σ value · row over entries: dX of rows, dW of classes; a warp a sum

`common.sampling` defines which entries are kept.
"""
