"""A tuned table for a GPU model that does not exist."""

from cutefce.autotune_cache import lookup, table
from cutefce.autotune_cache.table import Entry, Key, Table
from cutefce.cute_kernels.arch.sm90 import TALL, Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem

GPU = Gpu(Sm90(), "NVIDIA Test 9000", 132)
TUNED, OTHER = TALL, GemmConfig(128, 256, cluster=2, stages=4, pingpong=False)
KERNELS, DSL = jit_cache.source_fingerprint(), lookup.dsl_version()
VERSIONS = {"kernels": KERNELS, table.DSL_PACKAGE: DSL}
KEY = Key("project_exp", "bfloat16", 4096, 131072, 8192)
ENTRY = Entry(TUNED, 12.5, 13.0, 12.9, verified=True, kernels=KERNELS, dsl=DSL)
REJECTED: table.Rejections = {KEY.rejects(OTHER): "no answer within 30 s"}
TABLE = Table(GPU, VERSIONS, {KEY: ENTRY}, REJECTED)
PROBLEM = Problem(8192, 4096, 131072, "bfloat16", "cuda", arch="sm_90a")
