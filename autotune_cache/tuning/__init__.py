"""Verification of kernels before their first launch, and the tuner.

cases.py      inputs on which kernels are compared, and the comparison
outputs/      what is computed of them
runner.py     one GPU, how configurations run and are checked on it, and which kernels they launch
verify.py     which parts of calls are checked, and what follows
shapes.py     problems that are tuned by name
timing.py     interleaved timing
tuner.py      what is tuned, its candidates, and the trial that decides

`cutefce` has calls verify by `verify.verify_once`.
"""
