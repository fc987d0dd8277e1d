"""1. Call: public functions, argument checks, operators, autograd."""
