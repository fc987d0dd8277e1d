"""The fused loss in training frameworks; each file is one framework, imported only on request.

hooks.py          replacing a function of a framework, after a check that it is the expected one
liger.py          Liger: what transformers, LLaMA-Factory and ms-swift call
logit_options.py  scale and softcap of a transformers model, read and checked
nemo_rl.py        NeMo-RL: log-probabilities of Megatron policies
prime_rl.py       prime-rl: its fused heads
trl.py            TRL: SFT, DPO, KTO, GRPO, RLOO
verl.py           verl: fused log-probabilities and entropies
"""
