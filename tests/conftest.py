"""Puts this folder on the path, so that tests and benchmarks alike write `import zoo`."""

import os
import sys
from pathlib import Path

# The tensors of tests are tiny: a second thread only waits, and where cores are shared it waits long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))
