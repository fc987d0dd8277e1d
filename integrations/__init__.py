"""The fused loss in training frameworks; each file is one framework, imported only on request.

deferral/         a head that defers its logits, for any model and trainer: `cutefce.defer`
automodel.py      NeMo Automodel: a loss for `_target_`
axolotl.py        Axolotl: a plugin
axolotl_distillation.py  the loss of its stored top k
gradients.py      exact or sampled gradients: one setting for all of them
hooks.py          replacing a function of a framework, after a check that it is the expected one
liger.py          Liger: what transformers, LLaMA-Factory and ms-swift call
liger_distillation.py  its JSD of a student and a teacher
logit_options.py  scale and softcap of a transformers model, read and checked
main_grad.py      Megatron's protocol of gradient accumulation
megatron.py       Megatron-Core: the loss of a model, an output_processor, the linear fusion
nemo_rl.py        NeMo-RL: log-probabilities of Megatron policies
prime_rl.py       prime-rl: its fused heads
torchtitan.py     torchtitan: an override of the chunked loss
trl.py            TRL: SFT, DPO, KTO, GRPO, RLOO
trl_distillation.py  its distillation and GKD
verl.py           verl: fused log-probabilities and entropies
"""
