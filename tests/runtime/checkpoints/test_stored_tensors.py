"""What lies in a checkpoint directory is read, never run; checkpoints as torch writes them are read as before."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from holdfast.protocol.checkpoint_dir import DamagedCheckpointError
from holdfast.runtime.checkpoints.stored_tensors import METADATA, load_tensors, read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Run:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._path),)


def tensors() -> dict[str, torch.Tensor]:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
    named = {f"{place:06d}": torch.arange(6).reshape(2, 3).to(kind) for place, kind in enumerate(kinds)}
    return {**named, "scalar": torch.tensor(2.5), "empty": torch.zeros(0), "moe.0.expert.1.w1": torch.ones(2, 2, 2)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step-00000001"
    save(dict(tensors()), storage_writer=FileSystemWriter(path, single_file_per_rank=True), no_dist=True)
    return path


def rewrite(checkpoint: Path, change: Callable[[Metadata], object]) -> None:
    """Change the metadata as torch itself would read and write it."""
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    changed = change(metadata)
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata if changed is None else changed))


def load_fresh(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load_tensors(checkpoint, found)
    return found


def test_what_torch_writes_is_read(checkpoint: Path) -> None:
    for name, tensor in load_fresh(checkpoint).items():
        torch.testing.assert_close(tensor, tensors()[name], rtol=0, atol=0)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_any_python_may_have_written_it(checkpoint: Path, protocol: int) -> None:
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata, protocol=protocol))
    assert torch.equal(load_fresh(checkpoint)["000001"], tensors()["000001"])


def test_what_the_metadata_names_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (checkpoint / METADATA).write_bytes(pickle.dumps(Run(trap)))
    with pytest.raises(DamagedCheckpointError, match=r"\.metadata is refused: it names posix\.mkdir"):
        load_fresh(checkpoint)
    assert not trap.exists()


def test_a_trap_inside_honest_metadata_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    rewrite(checkpoint, lambda metadata: setattr(metadata, "planner_data", Run(trap)))
    with pytest.raises(DamagedCheckpointError, match=r"it names posix\.mkdir"):
        load_fresh(checkpoint)
    assert not trap.exists()


def test_what_is_said_to_be_no_tensor_is_not_unpickled(checkpoint: Path, tmp_path: Path) -> None:
    """torch would read it without any restriction."""
    trap = tmp_path / "trap"
    stored = io.BytesIO()
    torch.save(Run(trap), stored)
    (checkpoint / "__0_0.distcp").write_bytes(stored.getvalue())

    def bytes_instead(metadata: Metadata) -> None:
        metadata.state_dict_metadata["000001"] = BytesStorageMetadata()
        for index in [index for index in metadata.storage_data if index.fqn == "000001"]:
            metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 0, len(stored.getvalue()))

    rewrite(checkpoint, bytes_instead)
    with pytest.raises(DamagedCheckpointError, match="BytesStorageMetadata"):
        load_fresh(checkpoint)
    assert not trap.exists()


def test_what_lies_in_the_place_of_a_tensor_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    stored = io.BytesIO()
    torch.save(Run(trap), stored)
    (checkpoint / "__0_0.distcp").write_bytes(stored.getvalue())

    def moved(metadata: Metadata) -> None:
        for index in metadata.storage_data:
            metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 0, len(stored.getvalue()))

    rewrite(checkpoint, moved)
    with pytest.raises(DamagedCheckpointError, match=r"one names posix\.mkdir, which no tensor needs"):
        load_fresh(checkpoint)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (_StorageInfo("../secret", 0, 8), "lies outside the checkpoint"),
        (_StorageInfo("/etc/passwd", 0, 8), "lies outside the checkpoint"),
        (_StorageInfo("__0_0.distcp", -1, 8), "a size belongs"),
        (_StorageInfo("__0_0.distcp", 0, 8, ["stream.zstd"]), "encoded"),
        ("__0_0.distcp", "a str stands where a Place belongs"),
    ],
)
def test_places_outside_the_checkpoint_are_refused(checkpoint: Path, place: object, words: str) -> None:
    def moved(metadata: Metadata) -> None:
        for index in metadata.storage_data:
            metadata.storage_data[index] = place

    rewrite(checkpoint, moved)
    with pytest.raises(DamagedCheckpointError, match=words):
        load_fresh(checkpoint)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"\x80",
        b"garbage",
        pickle.dumps(None),
        pickle.dumps([[]] * 3),
        pickle.dumps({"a": 1}),
        pickle.dumps(torch.float32),
    ],
)
def test_what_is_no_metadata_is_damage(checkpoint: Path, bytes_: bytes) -> None:
    (checkpoint / METADATA).write_bytes(bytes_)
    with pytest.raises(DamagedCheckpointError, match=METADATA):
        load_fresh(checkpoint)


def test_metadata_that_is_missing_or_huge_is_damage(checkpoint: Path) -> None:
    (checkpoint / METADATA).unlink()
    with pytest.raises(DamagedCheckpointError, match="No such file"):
        load_fresh(checkpoint)
    with (checkpoint / METADATA).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DamagedCheckpointError, match="larger than"):
        load_fresh(checkpoint)


def test_a_class_cannot_be_changed_by_reading(checkpoint: Path) -> None:
    """A pickle may set attributes of whatever it can name: of torch's classes it can name none."""
    program = b"\x80\x04ctorch.distributed.checkpoint.metadata\nTensorProperties\n(N}V__init__\nNstb."
    (checkpoint / METADATA).write_bytes(program)
    with pytest.raises(DamagedCheckpointError):
        read_metadata(checkpoint)
    assert TensorProperties(dtype=torch.float32).dtype is torch.float32


def test_tensors_of_another_shape_or_name_are_damage(checkpoint: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="Size mismatch"):
        load_tensors(checkpoint, {"000001": torch.zeros(3, 3)})
    with pytest.raises(DamagedCheckpointError, match="unknown"):
        load_tensors(checkpoint, {"unknown": torch.zeros(3, 3)})


def test_bytes_that_are_no_tensor_are_damage(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.raises(DamagedCheckpointError, match="tensors cannot be read"):
        load_fresh(checkpoint)
