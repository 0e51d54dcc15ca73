"""The scripts of benchmarks/lazarus can be imported by the tests beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from places import BENCHMARKS, RECORDED

sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "lazarus")]


@pytest.fixture(scope="session")
def recorded() -> Path:
    """The folder with the recordings; what needs it is skipped where it is absent."""
    if not (RECORDED / "routing" / "lazarus_gpt_S_12L8E.npz").is_file():
        pytest.skip("the recordings are not there")
    return RECORDED
