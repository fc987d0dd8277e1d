"""The fused loss in training frameworks; each file is one framework, imported only on request.

automodel.py      NeMo Automodel: a loss for `_target_`
axolotl.py        Axolotl: a plugin
hooks.py          replacing a function of a framework, after a check that it is the expected one
megatron.py       Megatron-Core: the loss of a model, an output_processor, the linear fusion
torchtitan.py     torchtitan: an override of the chunked loss
"""
