"""Scripts under an agent that train without holdfast: each worker would train the whole model, so they are ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from holdfast.control.link.training_guard import TrainingGuard
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec
from warm_start import run_warm

PLAIN = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
print("trained")
"""
#: Imports the trainer from the framework's real package layout.
FIT = """
from lightning.pytorch.trainer.trainer import Trainer
print("trained", Trainer().fit("model", epochs=2))
"""
FRAMEWORK = """
class Trainer:
    def fit(self, model, epochs):
        return model, epochs
"""
INIT = "import holdfast\nholdfast.init()\n"

RunScript = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def framework(tmp_path: Path) -> Path:
    """A folder with a framework that has its own training loop."""
    package = tmp_path
    for part in ("lightning", "pytorch", "trainer"):
        package /= part
        package.mkdir()
        (package / "__init__.py").touch()
    (package / "trainer.py").write_text(FRAMEWORK)
    return tmp_path


@pytest.fixture
def run(warm_torch: str, framework: Path) -> RunScript:
    """Run a script as an agent's worker, or alone."""

    def start(text: str, *, agent: bool = True) -> CompletedProcess[str]:
        script = framework / "train.py"
        script.write_text(text)
        settings = WorkerSettings(spec=JobSpec(script="train.py"), socket="/nowhere", worker="n0/0/a")
        return run_warm(warm_torch, script, environment=settings.to_environment() if agent else None)

    return start


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (PLAIN, "a step of AdamW before holdfast.init(): each worker would train the whole model alone; "),
        (FIT, "lightning.Trainer.fit() would train the whole model on each node, into one folder: "),
        (INIT + FIT, "lightning.Trainer.fit() would train the whole model on each node, into one folder: "),
    ],
    ids=["plain", "framework", "framework after init"],
)
def test_training_without_holdfast_is_refused_before_its_first_step(run: RunScript, text: str, error: str) -> None:
    done = run(text)
    assert (done.returncode, done.stdout) == (2, "")
    to_do = "call holdfast.init(), job.protect(...), and train in a loop over job.steps(...)\n"
    assert done.stderr == f"holdfast: {error}{to_do}"


@pytest.mark.parametrize(("text", "agent"), [(PLAIN, False), (FIT, False), (INIT + PLAIN, True)])
def test_training_without_an_agent_or_after_init_is_allowed(run: RunScript, text: str, *, agent: bool) -> None:
    done = run(text, agent=agent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trained")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.distributed.init_process_group('gloo')",
        "import torch\ntorch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
    ],
)
def test_the_error_for_a_torchrun_script_lists_the_calls_to_remove(run: RunScript, text: str) -> None:
    done = run(text)
    assert done.returncode == 2
    assert done.stderr.count("Traceback") == 1
    assert "leave out init_process_group() and wrappers such as DistributedDataParallel" in done.stderr.splitlines()[-1]


def test_removing_the_guard_restores_the_patched_methods(framework: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(framework)
    for name in list(sys.modules):
        if name.partition(".")[0] == "lightning":
            monkeypatch.delitem(sys.modules, name)
    guard = TrainingGuard()
    guard.install()
    assert TrainingGuard.find_installed() is guard
    from lightning.pytorch.trainer import trainer  # pyright: ignore

    later = TrainingGuard()
    later.install()  # This guard finds the module already imported.
    with pytest.raises(BadInputError, match=r"lightning\.Trainer\.fit"):
        trainer.Trainer().fit("model", 1)
    guard.remove()
    guard.remove()
    with pytest.raises(BadInputError, match=r"lightning\.Trainer\.fit"):
        trainer.Trainer().fit("model", 1)
    later.remove()
    assert trainer.Trainer().fit("model", epochs=3) == ("model", 3)
    assert TrainingGuard.find_installed() is None
    for name in list(sys.modules):
        if name.partition(".")[0] == "lightning":
            del sys.modules[name]
