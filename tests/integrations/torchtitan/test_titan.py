"""torchtitan's trainer in a job, with the real package if it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.control.link.forking import PRELOAD
from holdfast.observability.event_lines import read_events
from holdfast.observability.history.audit import audit_events
from holdfast.observability.report import committed_steps
from holdfast.protocol.events import FailureDetected, GenerationStarted, RolledBack, StepCommitted
from places import ROOT
from tests.harness.local_job import LocalJob
from warm_start import run_warm, zygote

HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "titan_llama.py"
#: The packages that torchtitan's trainer imports.
NEEDED = ("torchtitan", "spmd_types", "tyro", "docstring_parser", "torchdata", "dill", "tensorboard", "google.protobuf")
HEAVY = ("torchtitan.trainer", "torchtitan.models.llama3.config_registry", "holdfast.integrations.torchtitan")
SIZES = ("--layers", "1", "--context", "16", "--global-batch", "12", "--steps", "14")

pytestmark = pytest.mark.xdist_group("torchtitan")


def _missing() -> str:
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{name} is not installed; `make install` tries to install it"
    return ""


@pytest.fixture(scope="module")
def warm_titan() -> Iterator[str]:
    """The socket of a zygote that has imported torchtitan; the import takes longer than all these tests."""
    if why := _missing():
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("datasets") is None:
            paths = (str(HERE / "stand_ins"), os.environ.get("PYTHONPATH", ""))
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        with zygote((*PRELOAD, *HEAVY)) as socket_path:
            yield socket_path


@pytest.mark.parametrize("check", ["arithmetic", "ignored", "refused", "dims", "spread", "loader"])
def test_torchtitan_checks_pass_with_the_real_package(warm_titan: str, check: str) -> None:
    done = run_warm(warm_titan, HERE / "titan_checks.py", check)
    assert done.returncode == 0, done.stderr


def test_a_killed_node_changes_no_loss(warm_titan: str, tmp_path: Path) -> None:
    """Sharded replicas of the debug model on two nodes, one killed, have the same losses as one process."""
    at_once = ("--zygote", warm_titan, "--workers-per-node")
    settings = {"XDG_RUNTIME_DIR": str(tmp_path)}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
    calm = LocalJob(
        EXAMPLE,
        (*SIZES, "--local-batch", "4"),
        options=("--nodes", "1", *at_once, "1"),
        folder=tmp_path / "calm",
        environment=settings,
    )
    killed = LocalJob(
        EXAMPLE,
        (*SIZES, "--local-batch", "2", "--shard", "2"),
        options=("--nodes", "2", *at_once, "2"),
        folder=tmp_path / "killed",
        environment=settings,
    )
    with calm as job:
        assert job.wait_exit(timeout=300.0) == 0, job.story()
        expected = {step.step: step.loss for step in committed_steps(read_events(job.events_file))}
    with killed as job:
        job.wait(StepCommitted, step=4)
        victim = job.nodes()[0]
        job.signal_node(victim)
        job.wait(FailureDetected, node=victim)
        job.wait(GenerationStarted, reason="failure", world_size=2)
        assert job.wait_exit(timeout=300.0) == 0, job.story()
        found = {step.step: step.loss for step in committed_steps(read_events(job.events_file))}
        assert audit_events(job.events).sound
        assert not job.all(RolledBack)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(found) == 14


def test_a_missing_torchtitan_is_reported_with_the_install_command(warm_torch: str, tmp_path: Path) -> None:
    script = tmp_path / "without.py"
    script.write_text(
        "import importlib.metadata as metadata, runpy, sys\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        f"sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
        f"sys.argv = [{str(EXAMPLE)!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    done = run_warm(warm_torch, script)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "titan_llama.py: torchtitan is not installed: pip install 'holdfast[torchtitan]'\n"
