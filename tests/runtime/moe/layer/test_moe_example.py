"""The example runs as a plain script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from places import EXAMPLES
from warm_start import run_warm

EXAMPLE = EXAMPLES / "moe_gpt.py"
SMALL = ("--layers", "2", "--dim", "16", "--hidden", "16", "--context", "8", "--heads", "2", "--global-batch", "8")


Run = Callable[..., subprocess.CompletedProcess[str]]


def run_cold(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the example as a shell does."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE), *SMALL, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def run(warm_torch: str) -> Run:
    """Return a function that runs the example without a cold start."""
    return lambda *arguments: run_warm(warm_torch, EXAMPLE, *SMALL, *arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_example_trains(dtype: str, tmp_path: Path, run: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 100)
    done = run("--steps", "20", "--dtype", dtype, "--lr", "0.01", "--text", str(text))
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 6.0


def test_a_top_k_above_the_number_of_experts_is_bad_input() -> None:
    done = run_cold("--experts", "2", "--top-k", "3")
    assert done.returncode == 2
    assert "--top-k is 3 and --experts is 2" in done.stderr


def test_a_routing_trace_of_another_model_is_bad_input(tmp_path: Path, run: Run) -> None:
    trace = tmp_path / "trace.npz"
    np.savez(trace, tokens=np.ones((3, 2, 4)), iterations=np.arange(3))
    done = run("--routing-trace", str(trace))
    assert done.returncode == 2
    assert "2 layers of 4 experts, the model has 2 layers of 8" in done.stderr
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 100)
    done = run("--routing-trace", str(trace), "--experts", "4", "--steps", "2", "--text", str(text))
    assert done.returncode == 0, done.stderr
