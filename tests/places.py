"""Paths of files that tests need."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
#: Scripts that replace training in tests without torch.
CONTROL_SCRIPTS = ROOT / "tests" / "control" / "scripts"
#: Recorded traces. They are not part of the project; tests that need a missing one are skipped.
RECORDED = ROOT.parent / "shared" / "data"
