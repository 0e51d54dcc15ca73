"""Make the scripts of benchmarks/unicron importable in the tests of this folder."""

from __future__ import annotations

import sys

from places import BENCHMARKS

sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "unicron")]
