"""Puts this folder on the path, so that tests and benchmarks alike write `import zoo`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
