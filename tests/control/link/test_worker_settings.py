"""A worker's settings travel in one environment variable."""

from __future__ import annotations

import pytest

from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.environment import WORKER
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec


def test_settings_survive_the_round_trip_through_the_environment() -> None:
    spec = JobSpec(name="j", args=("ä b", "--"), checkpoint=CheckpointSpec(dir="/kept", every=7))
    settings = WorkerSettings(spec=spec, socket="/s", worker="n/0/x", host="h", local_rank=3, script_digest="d")
    variables = settings.to_environment()
    assert set(variables) == {WORKER}
    assert WorkerSettings.from_environment(variables) == settings


def test_settings_are_none_without_the_environment_variable() -> None:
    assert WorkerSettings.from_environment({"PATH": "/bin"}) is None


@pytest.mark.parametrize("text", ["", "node-1/0/x", "{}", '{"spec": {}, "socket": "s", "worker": "w", "colour": 1}'])
def test_an_invalid_environment_variable_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="HOLDFAST_WORKER is set by agents only"):
        WorkerSettings.from_environment({WORKER: text})
