"""Several jobs in one pool with real processes: shares, deaths of the server and nodes, and users' requests."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from job_cases import TINY, TINY_MOE

from holdfast.control.pool_node.grant_processes import END_S
from tests.harness.local_pool import LocalPool

NODES = 4


@pytest.fixture
def pool(start_pool: Callable[..., LocalPool]) -> LocalPool:
    return start_pool(NODES)


FOREVER = ("--steps", "1000000", "--step-seconds", "0.2")


def test_jobs_share_nodes_and_survive_the_death_of_the_server_and_of_a_node(pool: LocalPool) -> None:
    again = ("pool", "--local", "1", "--store", f"sqlite:{pool.folder}/p.db")
    assert "is in use by another pool on this machine" in pool.call(*again, code=2)
    pool.submit("dense", "1:4", TINY, *FOREVER)
    pool.wait(pool.has("dense", NODES), "all nodes")
    pool.goes_on("dense")
    assert "dense" in pool.call("status", "-j", "dense")
    assert Path(pool.journals / "logs" / "dense").is_dir()
    pool.submit("experts", "2:2", TINY_MOE, *FOREVER)
    pool.wait(pool.has("experts", 2), "two nodes")
    pool.goes_on("dense", "experts")

    os.kill(pool.pid_of("server"), signal.SIGKILL)
    assert pool.call("status", "-j", "dense", code=3).startswith("holdfast: no pool answers at http://127.0.0.1:")
    pool.wait(lambda: len(pool.events("pool_started")) == 2, "another server")
    pool.goes_on("dense", "experts")
    jobs = {job["job"]: job for job in json.loads(pool.call("jobs", "--json"))["jobs"]}
    assert [len(jobs[name]["nodes"]) for name in ("dense", "experts")] == [2, 2]

    lost = pool.job("dense")["nodes"][0]
    grants = len(pool.events("node_granted"))
    os.kill(pool.pid_of(lost), signal.SIGKILL)
    pool.wait(lambda: len(pool.events("node_granted")) > grants, "the node's next grant")
    pool.wait(pool.has("dense", 2), "as many nodes as before")
    pool.goes_on("dense", "experts")

    assert "dense is stopped: a person has stopped it" in pool.call("stop", "-j", "dense")
    assert "is over" in pool.call("stop", "-j", "dense", code=4)
    pool.goes_on("experts")
    pool.check_journal_of("dense")
    pool.check_journal_of("experts")
    pool.check_owners()
    pool.end()
    ended = pool.events("job_ended")[-1]
    assert (ended["job"], ended["state"]) == ("experts", "stopped"), (
        "a job without checkpoints must be stopped, not failed"
    )


@pytest.mark.soak
def test_differing_scripts_and_invalid_requests_are_reported_and_jobs_continue(pool: LocalPool) -> None:
    _check_that_a_node_with_another_script_or_none_is_of_no_use(pool)
    _check_that_a_suspended_job_goes_on_where_it_was_and_wrong_requests_are_refused(pool)


def _check_that_a_suspended_job_goes_on_where_it_was_and_wrong_requests_are_refused(pool: LocalPool) -> None:
    saved = ("--checkpoint-dir", "saved")
    pool.submit("a", "2:2", TINY, *FOREVER, options=saved)
    pool.submit("b", "3:3", TINY, *FOREVER)
    assert "queued: it needs 3 nodes, and 2 can be given" in pool.call("jobs")
    explained = pool.call("explain", "-j", "b")
    assert "1 more node" in explained
    assert "the end of a" in explained
    pool.goes_on("a")
    assert "a  suspended" in pool.call("suspend", "-j", "a")
    steps = len(pool.steps("a"))
    pool.goes_on("b")
    assert "keeps no checkpoints" in pool.call("suspend", "-j", "b", code=4)
    pool.call("resume", "-j", "a")
    assert "queued" in pool.call("jobs")
    pool.call("stop", "-j", "b")
    pool.wait(pool.has("a", 2), "the nodes of a")
    pool.goes_on("a")
    assert pool.steps("a")[steps] == steps + 1, "a step was repeated or lost"

    refused = pool.call("submit", "--name", "huge", "--nodes", "9", str(TINY), code=2)
    assert "9 nodes" in refused
    assert "4 would fit" in refused
    assert "a job of this name is admitted" in pool.call("submit", "--name", "a", str(TINY), code=2)
    assert "weight" in pool.call("submit", "--set", "weight=0", str(TINY), code=2)
    (pool.folder / "job.toml").write_text(f'script = "{TINY}"\nwieght = 2\n')
    assert "weight" in pool.call("submit", "job.toml", code=2)
    assert "there is no script" in pool.call("submit", "nowhere.py", code=2)
    assert "no change is given" in pool.call("update", "-j", "a", code=2)
    pool.call("update", "-j", "a", "--weight", "2")
    assert pool.job("a")["weight"] == 2
    pool.check_owners()
    pool.submit("c", "3:3", TINY, *FOREVER)
    os.kill(pool.pid_of("server"), signal.SIGKILL)  # The next server saves the jobs.
    pool.end()
    assert "job a is being saved" in pool.log.read_text()
    assert pool.events("job_suspended")[-1]["job"] == "a"
    assert pool.events("job_resumed")[-1]["job"] == "c", "the job must be queued for the next pool"
    assert "c" not in [event["job"] for event in pool.events("job_admitted")]


def _check_that_a_node_with_another_script_or_none_is_of_no_use(pool: LocalPool) -> None:
    script = pool.folder / "mine.py"
    for name in ("averaging.py", "tiny.py"):
        shutil.copy(TINY.parent / name, pool.folder / name.replace("tiny", "mine"))
    pool.submit("one", "2:2", script, *FOREVER)
    pool.submit("two", "2:3", script, *FOREVER)
    pool.goes_on("one", "two")
    mine = set(pool.job("two")["nodes"])

    # The script changes while its jobs run, and another node joins one of them.
    text = script.read_text()
    script.write_text(f"{text}\n# another one\n")
    pool.call("stop", "-j", "one")
    pool.wait(lambda: len(pool.job("two")["refuses"]) == 2, "the refusal of both other nodes")
    assert set(pool.job("two")["nodes"]) == mine
    assert not mine & set(pool.job("two")["refuses"])
    explained = pool.call("explain", "-j", "two")
    for node in pool.job("two")["refuses"]:
        assert f"{node} cannot be used: script or arguments of node {node} differ from those of the job" in explained
    assert f"a node needs {script}, the same as on the job's other nodes" in explained
    refused = set(pool.job("two")["refuses"])
    differ = re.compile(r"script or arguments of node (node-\d) differ")
    pool.wait(lambda: set(differ.findall(pool.log.read_text())) == refused, "the refusals in the log")
    pool.goes_on("two")
    script.write_text(text)
    pool.wait(pool.has("two", 3), "a node with the restored script")
    pool.goes_on("two")

    # The script is deleted on all nodes before a queued job starts.
    other = pool.folder / "gone.py"
    shutil.copy(script, other)
    pool.submit("three", "3:3", other, *FOREVER)
    assert pool.job("three")["state"] == "queued"
    other.unlink()
    pool.call("stop", "-j", "two")
    pool.wait(lambda: pool.job("three")["state"] == "failed", "the end of a job that no node can run")
    assert f"there is no script {other} on it that can be read" in pool.job("three")["why"]
    assert "is failed: too few usable nodes in the pool (needs 3)" in pool.call("explain", "-j", "three")
    _check_that_the_output_of_a_failed_job_can_be_read(pool)
    _check_that_code_after_the_loop_runs_to_its_end_before_the_node_has_another_job(pool)
    pool.submit("four", "4:4", TINY, *FOREVER)
    pool.goes_on("four")
    pool.check_journal_of("two")
    pool.check_owners()
    pool.call("stop", "-j", "four")


def _check_that_the_output_of_a_failed_job_can_be_read(pool: LocalPool) -> None:
    script = pool.folder / "raises.py"
    script.write_text("import holdfast\nholdfast.init()\nraise ValueError('the data is gone')\n")
    pool.submit("raises", "1", script)
    pool.wait(lambda: pool.job("raises")["state"] == "failed", "the end of a job whose script raises")
    assert "ValueError: the data is gone" in pool.call("logs", "-j", "raises")
    stands, advice = pool.call("status", "-j", "raises").splitlines()
    assert stands.startswith("raises: failed: ValueError: the data is gone")
    assert advice == "its output: holdfast logs -j raises"


def _check_that_code_after_the_loop_runs_to_its_end_before_the_node_has_another_job(pool: LocalPool) -> None:
    """The code was once killed three seconds after the job had finished."""
    script, model = pool.folder / "finishes.py", pool.folder / "model"
    late = f"time.sleep({END_S + 1.0})\nopen({str(model)!r}, 'w').write('whole')\n"
    script.write_text(TINY.read_text() + "\nif job.rank == 0:\n" + textwrap.indent(late, "    "))
    pool.submit("finishes", "1", script, "--steps", "3")
    pool.wait(lambda: pool.job("finishes")["state"] == "finished", "the end of a job")
    assert not model.exists()
    pool.wait(model.exists, "the file from the code after the loop")
