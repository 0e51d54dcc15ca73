"""Make the benchmarks' scripts and packages importable in the tests of this folder."""

from __future__ import annotations

import sys

from places import BENCHMARKS, ROOT

sys.path[:0] = [str(BENCHMARKS), str(ROOT)]
