"""Losses of log-probabilities, each a file to copy: none of them makes logits.

dpo.py                 pairs against a reference model
orpo.py                pairs without a reference model
grpo.py                sampled completions with advantages
topk_distillation.py   a teacher's top k of each token
"""
