"""Benchmarks and scripts are programs, not packages: their folders go behind everything else on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
