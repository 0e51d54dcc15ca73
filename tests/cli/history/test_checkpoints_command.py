"""Tests of `holdfast checkpoints`: list, verify and export, on directories written by real jobs."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from holdfast.cli import main
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.directory import find_checkpoints
from holdfast.runtime.checkpoints import torch_file
from holdfast.runtime.session.job import Job
from holdfast.storage import LocalStorage


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module, torch.optim.Optimizer]:
    """Return the directory of a single-worker job saved at steps 2 and 4, with its final model and optimizer."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    job = Job(None, checkpoint_dir=str(folder), checkpoint_every=2)
    job.protect(model, optimizer, data, global_batch=8, micro_batch=4, extra={"seen": Seen()})
    for step in job.steps(4):
        for x, y in step.micro_batches():
            step.backward(mse_loss(model(x), y))
        step.apply()
    return folder, model, optimizer


class Seen:
    def state_dict(self) -> dict[str, Any]:
        return {"order": (1, 2), "names": {"b", "a"}, "last": torch.tensor([3.0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(f"nothing is resumed here: {state}")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["holdfast", "checkpoints", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_list_prints_every_checkpoint_of_the_directory(
    trained: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained[0]
    code, out, _ = run(capsys, monkeypatch, "list", str(folder), "--json")
    found = json.loads(out)["checkpoints"]
    assert (code, [row["step"] for row in found], {row["counts"] for row in found}) == (0, [2, 4], {True})
    assert {row["parts"] for row in found} == {1}
    code, out, _ = run(capsys, monkeypatch, "list", f"file://{folder}")
    assert (code, len(out.splitlines())) == (0, 2)


def test_damaged_and_unfinished_checkpoints_are_reported(
    trained: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained[0], folder)
    code, out, _ = run(capsys, monkeypatch, "verify", str(folder))
    assert (code, out.count(": intact")) == (0, 2)
    first, second = (folder / name.folder for name in find_checkpoints(LocalStorage(folder)))
    (part,) = first.glob("part-*")
    part.write_bytes(part.read_bytes()[:-1] + b"\1")
    code, out, _ = run(capsys, monkeypatch, "verify", str(folder), "--json")
    assert code == 1
    assert [one["intact"] for one in json.loads(out)["checkpoints"]] == [False, True]
    code, out, _ = run(capsys, monkeypatch, "verify", str(folder), "--step", "4")
    assert (code, out.count(": intact")) == (0, 1)
    (second / "manifest.json").unlink()
    _, out, _ = run(capsys, monkeypatch, "list", str(folder))
    assert "never finished" in out
    code, _, err = run(capsys, monkeypatch, "export", str(folder), "-o", str(tmp_path / "x"))
    assert code == 1
    assert "has other content than was written" in err
    assert not (tmp_path / "x").exists()


def test_a_safetensors_export_has_the_full_state_or_only_the_model(
    trained: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pytest.importorskip("safetensors.torch")
    folder, model, _ = trained
    code, _, _ = run(capsys, monkeypatch, "export", str(folder), "-o", str(tmp_path / "model"), "--model-only")
    assert code == 0
    found = files.load_file(tmp_path / "model")
    assert set(found) == set(model.state_dict())
    model.load_state_dict(found)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor)
    run(capsys, monkeypatch, "export", str(folder), "-o", str(tmp_path / "all"), "--step", "2")
    assert {"optimizer:state.0.exp_avg", "extra:seen:last", "0.weight"} <= set(files.load_file(tmp_path / "all"))


def test_a_torch_export_loads_with_weights_only(
    trained: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model, optimizer = trained
    output = tmp_path / "state.pt"
    code, out, _ = run(capsys, monkeypatch, "export", str(folder), "-o", str(output), "--format", "torch", "--json")
    assert (code, json.loads(out)["step"]) == (0, 4)
    state = torch.load(output, weights_only=True)
    assert set(state) == {"step", "model", "experts", "optimizer", "extra"}
    for name, tensor in model.state_dict().items():
        assert torch.equal(state["model"][name], tensor)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert state["extra"] == {"seen": {"order": (1, 2), "names": ["a", "b"], "last": torch.tensor([3.0])}}


@contextmanager
def short_files(most: int) -> Generator[None]:
    """Limit the file size of this process, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_unwritable_output_file_is_named_in_the_error(
    trained: tuple[Path, Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = trained[0], tmp_path / "out"
    with short_files(500):
        code, _, err = run(capsys, monkeypatch, "export", str(folder), "-o", str(output))
    assert (code, err) == (2, f"holdfast: --output {output} cannot be written: File too large\n")
    name = find_checkpoints(LocalStorage(folder))[-1].folder
    with short_files(500), pytest.raises(BadInputError, match="out cannot be written: File too large"):
        torch_file.main(str(folder), name, str(output), "all")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("list", "nowhere"), "nowhere is not a folder"),
        (("verify", "."), "there is no checkpoint"),
        (("export", "."), "--output is missing"),
        (("export", ".", "-o", "x"), "there is no checkpoint"),
        (("export", ".", "-o", "no/where"), "--output no/where: give a file"),
        (("export", ".", "-o", "."), "--output .: give a file"),
        (("export", ".", "-o", "/dev/null"), "--output /dev/null: give a file"),
        (("list", "nosuch://x"), "nosuch://x cannot be used"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    args: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, monkeypatch, *args)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1
