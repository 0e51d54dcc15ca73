"""Make the scripts of benchmarks/lazarus importable in the tests of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from places import BENCHMARKS, RECORDED

sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "lazarus")]


@pytest.fixture(scope="session")
def recorded() -> Path:
    """Return the folder with the recordings; tests that need it are skipped if it is absent."""
    if not (RECORDED / "routing" / "lazarus_gpt_S_12L8E.npz").is_file():
        pytest.skip("the recordings are not there")
    return RECORDED
