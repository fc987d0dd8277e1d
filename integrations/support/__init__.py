"""What the integrations share.

gathered.py       hidden states that Megatron gathered from ranks
hooks.py          replacing a function of a framework, after a check that it is the expected one
logit_options.py  what a transformers model does to its logits, told by deferred ones
main_grad.py      Megatron's protocol of gradient accumulation
nested.py         tensors in place of objects that stand for them, in nested arguments
"""
