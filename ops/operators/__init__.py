"""The inner operators: what autograd, compilers and graph capture see of a call."""
