"""A head that defers its logits, so that a model's own cross entropy becomes the fused call.

model.py       defer, undefer and deferral_report: finding the heads of a model
head.py        DeferringLinear, the head that defers
head_call.py   what the logits of one call of it share
runners.py     what runs a model, and looks for tensors in what it returns
logits.py      DeferredLogits, the plain object that stands for logits
record.py      which logits they are, and the operations that can be recorded
indexing.py    which rows and classes an index of logits selects
loss.py        torch.nn.functional.cross_entropy of deferred logits
divergence.py  linear_divergence of a student's and a teacher's deferred logits
log_probs.py   linear_log_probs and entropies of deferred logits
report.py      counts of fused losses and of fallbacks
"""

from cutefce.integrations.deferral.model import defer as defer
from cutefce.integrations.deferral.model import deferral_report as deferral_report
from cutefce.integrations.deferral.model import undefer as undefer
from cutefce.integrations.deferral.report import DeferralReport as DeferralReport
