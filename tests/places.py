"""Where files are that tests need."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
EXAMPLES = ROOT / "examples"
#: scripts that stand for training where no torch is wanted
CONTROL_SCRIPTS = ROOT / "tests" / "control" / "scripts"
#: recorded traces; they are not part of the project, and a test that needs one is skipped where it is absent
RECORDED = ROOT.parent / "shared" / "data"
