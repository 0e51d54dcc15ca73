"""The table of environment variables, and the variables that workers inherit."""

from __future__ import annotations

import re

import pytest

from holdfast import environment as env
from holdfast.errors import BadInputError
from places import ROOT


def test_workers_inherit_no_secrets_and_no_variables_of_other_launchers() -> None:
    given = {"PATH": "/bin", env.TOKEN: "s", env.TOKEN_FILE: "f", env.LOG: "debug", "RANK": "1", "WORLD_SIZE": "2"}
    given |= {"MASTER_ADDR": "h", "MASTER_PORT": "1", env.WORKER: "{}", env.LOADER: "0"}
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert env.for_workers(given) == {"PATH": "/bin", env.LOG: "debug", **defaults}
    assert env.for_workers({"OMP_NUM_THREADS": "7"}) == {**defaults, "OMP_NUM_THREADS": "7"}


def test_the_log_level_is_read_from_the_environment() -> None:
    assert env.log_level({}, "info") == env.log_level({env.LOG: ""}, "info") == "info"
    assert env.log_level({env.LOG: "debug"}, "info") == "debug"
    with pytest.raises(BadInputError, match="HOLDFAST_LOG is 'loud': it must be one of debug, info, warning, error"):
        env.log_level({env.LOG: "loud"}, "info")


def test_every_holdfast_variable_is_in_the_table() -> None:
    table = {*env.PUBLIC, env.WORKER, env.LOADER}
    for path in (ROOT / "src").rglob("*.py"):
        assert set(re.findall(r"HOLDFAST_[A-Z_]+", path.read_text())) <= table, path
