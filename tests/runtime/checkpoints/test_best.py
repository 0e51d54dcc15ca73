"""The best states keep their own files, even after their checkpoints are removed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest

from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.runtime.checkpoints.best import BestChoice, BestStates, Rating
from holdfast.storage import LocalStorage


def written(directory: Path, step: int) -> Path:
    """Write files that look like a checkpoint."""
    storage, name = LocalStorage(directory), CheckpointName(term=1, generation=1, step=step, nonce="ab")
    file = checkpoint_dir.write_file(storage, name.folder, "data", [f"state {step}".encode()])
    checkpoint_dir.seal(storage, name, [file])
    return directory / name.folder


def rated(
    best: BestStates,
    step: int,
    value: float,
    mode: Literal["min", "max"] = "min",
    keep: int = 2,
    monitor: str = "loss",
) -> None:
    best.add_rating(
        Rating(evaluation="eval", step=step, monitor=monitor, value=value),
        BestChoice(monitor=monitor, mode=mode, keep=keep),
    )


def kept(directory: Path) -> dict[int, str]:
    """Return the step of each kept state, with the content of its files."""
    found = {path: (path / "data").read_text() for path in sorted(directory.glob("best-*")) if path.is_dir()}
    recorded = [json.loads(path.read_text())["step"] for path in sorted(directory.glob("best-*.json"))]
    steps = [int(path.name.rsplit("-", 1)[1]) for path in found]
    assert recorded == steps
    return dict(zip(steps, found.values(), strict=True))


@pytest.mark.parametrize(("mode", "best_two"), [("min", [2, 5]), ("max", [1, 4])])
def test_the_best_states_are_kept_and_others_are_removed(tmp_path: Path, mode: Any, best_two: list[int]) -> None:
    best = BestStates(LocalStorage(tmp_path))
    for step, value in enumerate((9.0, 1.0, 5.0, 8.0, 2.0), start=1):
        path = written(tmp_path, step)
        rated(best, step, value, mode)
        shutil.rmtree(path)  # Remove the checkpoint as pruning does.
    assert kept(tmp_path) == {step: f"state {step}" for step in best_two}
    for step in best_two:
        assert checkpoint_dir.verify(LocalStorage(tmp_path), f"best-eval-{step:08d}") == step


def test_a_best_state_is_kept_once_its_checkpoint_is_complete(tmp_path: Path) -> None:
    best = BestStates(LocalStorage(tmp_path))
    rated(best, 3, 1.0)
    assert kept(tmp_path) == {}
    path = written(tmp_path, 3)
    best.keep_rated(3)
    assert kept(tmp_path) == {3: "state 3"}
    assert os.stat(path / "data").st_ino == os.stat(tmp_path / "best-eval-00000003" / "data").st_ino, (
        "a kept state must share its files with the checkpoint"
    )


def test_a_best_state_with_an_overtaken_checkpoint_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = BestStates(LocalStorage(tmp_path))
    rated(best, 3, 1.0)
    best.on_complete(2)
    assert caplog.messages == []
    written(tmp_path, 5)
    best.on_complete(5)
    best.on_complete(6)
    message = (
        "the state of step 3, one of the best of eval, is not kept: the checkpoint of step 5 was complete before its"
    )
    assert caplog.messages == [f"{message} own"]
    assert kept(tmp_path) == {}


def test_a_new_job_continues_with_the_existing_best_states(tmp_path: Path) -> None:
    for step, value in ((1, 3.0), (2, 2.0), (3, 1.0)):
        written(tmp_path, step)
        rated(BestStates(LocalStorage(tmp_path)), step, value)
    assert sorted(kept(tmp_path)) == [2, 3]


def test_a_repeated_step_replaces_its_previous_best_state(tmp_path: Path) -> None:
    best = BestStates(LocalStorage(tmp_path))
    written(tmp_path, 1)
    rated(best, 1, 1.0)
    rated(best, 1, 9.0)
    assert json.loads((tmp_path / "best-eval-00000001.json").read_text())["value"] == 9.0
    assert sorted(kept(tmp_path)) == [1]


def test_unrelated_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "best-eval-mine.json").write_text("{")
    best = BestStates(LocalStorage(tmp_path))
    for step, value in ((2, 5.0), (3, 7.0)):
        written(tmp_path, step)
        rated(best, step, value, keep=1)
    assert (tmp_path / "best-eval-mine.json").read_text() == "{"
    (tmp_path / "best-eval-mine.json").unlink()
    assert sorted(kept(tmp_path)) == [2]


def test_best_states_of_another_monitor_are_not_compared(tmp_path: Path) -> None:
    best = BestStates(LocalStorage(tmp_path))
    for step, value in ((1, 0.5), (2, 0.4)):
        written(tmp_path, step)
        rated(best, step, value)
    for step, value in ((3, 0.7), (4, 0.8), (5, 0.9)):
        written(tmp_path, step)
        rated(best, step, value, "max", monitor="accuracy")
    assert kept(tmp_path).keys() == {1, 2, 4, 5}


@pytest.mark.parametrize(
    "content",
    [b"", b'{"evaluation": "\xff"}', b'{"x": ' + b"[" * 60_000 + b"]" * 60_000 + b"}"],
    ids=["empty", "bad UTF-8", "nested"],
)
def test_a_record_that_cannot_be_decoded_is_not_touched(tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "best-eval-00000009.json"
    bad.write_bytes(content)
    written(tmp_path, 1)
    rated(BestStates(LocalStorage(tmp_path)), 1, 1.0)
    assert bad.read_bytes() == content
    assert (tmp_path / "best-eval-00000001" / "data").exists()
