"""Tests of warnings about settings that have no effect because another one is missing."""

from __future__ import annotations

import pytest

from holdfast.cli.spec_options import collect_job, job_spec, without_effect

NO_STANDBY = (
    "--set recovery.on_node_failure is standby, and the job has no standbys: it goes on with fewer nodes; "
    "give --standbys"
)
CASES = {
    ("checkpoint.every=10",): ["--set checkpoint.every has no effect: give --checkpoint-dir, too"],
    ("checkpoint.rate=1MB",): ["--set checkpoint.rate has no effect: give --checkpoint-dir, too"],
    ("checkpoint.every=10", "checkpoint.dir=ckpt"): [],
    ("recovery.on_node_failure=standby",): [NO_STANDBY],
    ("recovery.on_node_failure=standby", "recovery.standbys=1"): [],
    (): [],
}


@pytest.mark.parametrize(("pairs", "warnings"), CASES.items())
def test_settings_without_effect_are_warned_about(pairs: tuple[str, ...], warnings: list[str]) -> None:
    given = collect_job("train.py", (), pairs, {})
    assert list(without_effect(given, job_spec(given))) == warnings
