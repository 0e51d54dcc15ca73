"""Every benchmark starts, and its help describes its purpose and options."""

from __future__ import annotations

import subprocess

from places import BENCHMARKS
from warm_start import run_warm


def test_every_benchmark_prints_its_usage(warm_torch: str) -> None:
    scripts = [path for path in sorted(BENCHMARKS.rglob("*.py")) if 'if __name__ == "__main__":' in path.read_text()]
    helps = {script.name: run_warm(warm_torch, script, "--help") for script in scripts}
    assert len(helps) > 20
    assert {name: done.stderr for name, done in helps.items() if not _is_usage(done)} == {}


def _is_usage(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and done.stdout.startswith("usage: ") and len(done.stdout.splitlines()) > 3
