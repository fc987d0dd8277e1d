"""Hopper kernels: mainloop, epilogue stores, `project_exp` and the gradient GEMMs."""
