"""The benchmarks' scripts and packages can be imported by the tests next to this file."""

from __future__ import annotations

import sys

from places import BENCHMARKS, ROOT

sys.path[:0] = [str(BENCHMARKS), str(ROOT)]
