"""Puts this folder on the path, so that tests and benchmarks alike write `import zoo`."""

import os
import sys
from pathlib import Path

import pytest

# The tensors of tests are tiny: a second thread only waits, and where cores are shared it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A fault of memfit's own is a failure here, no batch that runs whole. Processes that tests start are told, too.
os.environ.setdefault("MEMFIT", "strict")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked as slow."""
    from thinned import thin_out

    thin_out(items)
