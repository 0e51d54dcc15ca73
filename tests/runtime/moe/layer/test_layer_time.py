"""The benchmark of a layer's time runs, and its variants compute the same."""

from __future__ import annotations

from places import BENCHMARKS
from warm_start import run_warm


def test_the_layer_time_benchmark_completes(warm_torch: str) -> None:
    sizes = ("--turns", "1", "--tokens", "32", "--dim", "16", "--hidden", "16", "--experts", "4")
    done = run_warm(warm_torch, BENCHMARKS / "layer_time.py", *sizes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("x (asked <= 1.1)") == 3
