"""4. Primitives: what the steps of programs launch, on the kernels and in plain torch."""
