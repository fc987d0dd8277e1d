"""Losses of a student and a teacher in training frameworks, which their integrations enable.

axolotl.py  the `kd` plugin of Axolotl, from a stored top k
liger.py    Liger's JSD, which ms-swift's GKD calls
nemo_rl.py  NeMo-RL's distillation from a top k
trl.py      TRL's distillation and GKD
"""
