"""The O(N·D) and O(N·P) kernels for all architectures: row work before and after the GEMMs.

    select_rows       the order of rows in which those that count come first, and their number
    move_rows         out_i = x_{order_i} of these, or scale_i x_{order_i}, or out_{order_i} = x_i;
                      0 of the others, or these alone; or scale_i x_i of all, a block a row
    target_logit      r_i = h_i · w_y, a warp a row; zeroes the semaphores of later kernels
    reduce_partials   partial sums to ρ, S, T and the loss, a warp a row; the last block reduces
    row_coefficients  s_i and c_i of a backward, a thread a token; zeroes semaphores
    scale_add_rows    out_i = row_scale_i x_i + gather_scale_i table_{index_i}, a block a row:
                      the last step of dX, which may add factor_i row and place row i where the
                      call has it
    packed_sums         dX's sums of a chunk in 20 or 24 bits, dX of these or rows of them times
                      factors, and dW, a factor times such sums; a block a row
    sort_targets      the tokens of every class, in order, a thread block 1024 classes


Each reads and writes its operands once, in vectors of 16 bytes, and adds in a fixed order.
"""
