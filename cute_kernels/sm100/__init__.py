"""Blackwell kernels: mainloop and `project_exp`."""
