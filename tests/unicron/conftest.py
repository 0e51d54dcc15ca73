"""The scripts of benchmarks/unicron can be imported by the tests beside this file."""

from __future__ import annotations

import sys

from places import BENCHMARKS

sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "unicron")]
