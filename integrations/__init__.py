"""The fused loss in training frameworks; each file is one framework, imported only on request.

deferral/         a head that defers its logits, for any model and trainer: `cutefce.defer`
hooks.py          replacing a function of a framework, after a check that it is the expected one
"""
