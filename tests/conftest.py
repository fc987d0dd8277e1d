"""Loads what the tests share, where tests run.

The process that hands out tests to others starts without: it would import torch and the package
while they wait for it.
"""

import gc
import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that run tests, and that tests start
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu",
        action="store_true",
        help="run on an NVIDIA GPU what can run there, and nothing else",
    )
    parser.addoption(
        "--without-kernels",
        action="store_true",
        help="on a GPU, run calls as one without kernels in CuTe does: on Triton's",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Load `tests.support.plugin`, unless other processes run the tests."""
    if not config.pluginmanager.hasplugin("dsession"):  # of pytest-xdist
        gc.disable()  # up to the end of the collection: there is hardly any garbage before
        config.pluginmanager.import_plugin("tests.support.plugin")
