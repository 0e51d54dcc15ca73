"""A worker's settings travel in one environment variable."""

from __future__ import annotations

import pytest

from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.environment import WORKER
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec


def test_they_come_back_as_they_were() -> None:
    spec = JobSpec(name="j", args=("ä b", "--"), checkpoint=CheckpointSpec(dir="/kept", every=7))
    settings = WorkerSettings(spec=spec, socket="/s", worker="n/0/x", host="h", local_rank=3, script_digest="d")
    variables = settings.to_environment()
    assert set(variables) == {WORKER}
    assert WorkerSettings.from_environment(variables) == settings


def test_without_the_variable_nobody_has_started_us() -> None:
    assert WorkerSettings.from_environment({"PATH": "/bin"}) is None


@pytest.mark.parametrize("text", ["", "node-1/0/x", "{}", '{"spec": {}, "socket": "s", "worker": "w", "colour": 1}'])
def test_what_no_agent_has_set_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="HOLDFAST_WORKER is set by agents only"):
        WorkerSettings.from_environment({WORKER: text})
