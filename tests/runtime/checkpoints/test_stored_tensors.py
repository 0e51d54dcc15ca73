"""Checkpoint files are read but never executed, at any world size, and torch's own reader can read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.joining import join_into_file
from holdfast.protocol.checkpoints.names import CheckpointName
from holdfast.runtime.checkpoints.parts import copy_part, part_name, stored_names
from holdfast.runtime.checkpoints.stored_tensors import load_tensors
from holdfast.runtime.state.state import StateView, TrainingState
from holdfast.storage import LocalStorage
from resealing import reseal

NAME = CheckpointName(term=1, generation=1, step=1, nonce="ab")
KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


class Kept:
    """Objects with state of all kinds."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {str(kind): torch.arange(21).reshape(7, 3).to(kind) for kind in KINDS}
        self.state |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "complex": torch.ones(3) * 1j}
        self.state |= {"imaginary": torch.tensor(2j), "across": torch.arange(12.0).reshape(3, 4).T, "much": [1, "a"]}

    def state_dict(self) -> dict[str, object]:
        return self.state

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.state = state


def view() -> StateView:
    torch.manual_seed(7)
    model = torch.nn.Linear(5, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return TrainingState(model, optimizer, {"kept": Kept()}).capture()


def write(folder: Path, parts: int, rows: dict[str, torch.Tensor] | None = None) -> Path:
    storage, state = LocalStorage(folder), view()
    files = [
        directory.write_file(storage, NAME.folder, part_name(part, parts), copy_part(state, part, parts, rows).chunks())
        for part in range(parts)
    ]
    directory.seal(storage, NAME, files)
    return folder / NAME.folder


def read(checkpoint: Path) -> dict[str, torch.Tensor]:
    state = view()
    found = {name: torch.empty_like(t) for name, t in zip(stored_names(state.manifest), state.tensors, strict=True)}
    load_tensors(LocalStorage(checkpoint.parent), checkpoint.name, found)
    return found


def assert_whole(found: dict[str, torch.Tensor]) -> None:
    state = view()
    for name, tensor in zip(stored_names(state.manifest), state.tensors, strict=True):
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 200])
def test_the_stored_state_is_the_same_for_any_number_of_writers(tmp_path: Path, parts: int) -> None:
    assert_whole(read(write(tmp_path, parts)))


def test_part_sizes_differ_by_at_most_two_rows(tmp_path: Path) -> None:
    state = view()
    row = max(t.numel() * t.element_size() // max(t.shape[0], 1) for t in state.tensors if t.dim())
    sizes = [copy_part(state, part, 4).data.numel() for part in range(4)]
    assert sum(sizes) == state.nbytes
    assert max(sizes) - min(sizes) <= 2 * row


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_of_torch_loads_the_parts_as_one_state(tmp_path: Path) -> None:
    checkpoint, state = write(tmp_path, 3), view()
    wanted = {
        name: torch.empty_like(tensor)
        for name, tensor in zip(stored_names(state.manifest), state.tensors, strict=True)
        if not tensor.is_complex()  # This is a type that safetensors has no name for.
    }
    load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    assert {"weight", "bias", "optimizer:state.0.exp_avg"} <= set(wanted)
    for name, tensor in zip(stored_names(state.manifest), state.tensors, strict=True):
        if not tensor.is_complex():
            torch.testing.assert_close(wanted[name], tensor, rtol=0, atol=0)


def test_safetensors_reads_the_joined_file(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    checkpoint, state = write(tmp_path, 3), view()
    _, content = join_into_file(LocalStorage(tmp_path), checkpoint.name, lambda name: True)
    found = torch_files.load(b"".join(content))
    for name, tensor in zip(stored_names(state.manifest), state.tensors, strict=True):
        if not tensor.is_complex():
            torch.testing.assert_close(found[name], tensor.contiguous(), rtol=0, atol=0)
    assert set(found) == set(stored_names(state.manifest))


def test_duplicate_tensor_names_are_made_unique() -> None:
    model = torch.nn.Module()
    model.register_module("optimizer:state", torch.nn.Linear(2, 2))
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), {"a": Kept()}).capture()
    names = stored_names(state.manifest)
    assert len(set(names)) == len(names)


def spoil(checkpoint: Path, change: str) -> None:
    """Change the entry of the tensor `weight` in the header of the first part."""
    path = checkpoint / part_name(0, 3)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["weight"]
    if change == "shape":
        entry["shape"] = entry["shape"][::-1]
    elif change == "type":
        entry["dtype"] = "I32"
    elif change == "offsets":
        entry["data_offsets"] = [begin + 4 for begin in entry["data_offsets"]]
    elif change == "beyond":
        entry["data_offsets"] = [1 << 40, 1 << 41]
    elif change == "negative":
        entry["shape"] = [-1, -1]
    elif change == "rows":
        about = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        about["weight"]["saved_offsets"][0] += 1
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(about)
    elif change == "name":
        header["other"] = header.pop("weight")
    elif change == "nothing":
        header = []
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    reseal(checkpoint)


@pytest.mark.parametrize("change", ["shape", "type", "offsets", "beyond", "negative", "rows", "name", "nothing"])
def test_inconsistent_parts_are_reported_as_damage(tmp_path: Path, change: str) -> None:
    checkpoint = write(tmp_path, 3)
    spoil(checkpoint, change)
    with pytest.raises(DamagedCheckpointError):
        read(checkpoint)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"{}" + b"\0", b"\x80\x04."])
def test_a_part_that_is_not_a_tensor_file_is_reported_as_damage(tmp_path: Path, data: bytes) -> None:
    checkpoint = write(tmp_path, 3)
    (checkpoint / part_name(1, 3)).write_bytes(data)
    reseal(checkpoint)
    with pytest.raises(DamagedCheckpointError):
        read(checkpoint)


def test_a_missing_part_is_reported_as_damage(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 3)
    (checkpoint / part_name(1, 3)).unlink()
    reseal(checkpoint)
    with pytest.raises(DamagedCheckpointError, match="does not hold all of"):
        read(checkpoint)
