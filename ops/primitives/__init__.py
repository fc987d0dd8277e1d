"""4. Primitives: the steps, on the kernels and in plain torch."""
