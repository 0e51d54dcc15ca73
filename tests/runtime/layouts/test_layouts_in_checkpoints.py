"""A checkpoint written under one layout loads under each other layout, equal in every bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from spread_states import Late, SpreadState, unit
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from holdfast.control.link.checkpoints.store import PartToWrite
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory
from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.checkpoints.directory import DamagedCheckpointError
from holdfast.protocol.checkpoints.joining import join_into_file
from holdfast.protocol.checkpoints.names import CheckpointName, StoredFile
from holdfast.protocol.layouts.layout import Layout
from holdfast.runtime.checkpoints.global_terms import encode_manifest
from holdfast.runtime.checkpoints.parts import part_name, stored_names
from holdfast.runtime.checkpoints.saver import CheckpointSaver, PartShare, load_checkpoint
from holdfast.runtime.checkpoints.torch_file import read_state
from holdfast.runtime.dtensor.local import local_of, placement_of
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.state.state import TrainingState
from holdfast.storage import LocalStorage
from resealing import reseal

LAYOUTS = {
    "whole": Layout(),
    "shard 2": Layout(shard=2),
    "shard 3": Layout(shard=3),
    "shard 4": Layout(shard=4),
    "tensor 2": Layout(tensor=2),
    "shard 2 x tensor 2": Layout(shard=2, tensor=2),
}
BOTH = "shard 2 x tensor 2"
UNITS = 2
NAME = CheckpointName(term=1, generation=1, step=2, nonce="ab")


class Sink:
    """A checkpoint sink that writes immediately."""

    is_free = True

    def __init__(self, storage: LocalStorage) -> None:
        self.storage, self.files = storage, list[StoredFile]()

    def write(self, part: PartToWrite) -> None:
        assert part.name == NAME
        for name, content in part.files.items():
            self.files.append(directory.write_file(self.storage, NAME.folder, name, content()))

    def close(self) -> None: ...


def saver_of(storage: LocalStorage, one: SpreadState, sink: Sink | None = None) -> CheckpointSaver:
    def record(message: object) -> None:
        pytest.fail(f"unexpected message: {message}")

    sink = sink or Sink(storage)
    return CheckpointSaver(storage=storage, worker="n/0/a", every=1, sink=sink, send=record, position=one.place)


def write(folder: Path, places: list[SpreadState], units: int = UNITS) -> LocalStorage:
    """Write a checkpoint as a job with this many replica groups would."""
    storage, world = LocalStorage(folder), units * len(places)
    sink = Sink(storage)
    for rank in range(world):
        one = places[rank % len(places)]
        share = PartShare(term=NAME.term, generation=NAME.generation, rank=rank, world=world, seal=NAME.nonce)
        assert saver_of(storage, one, sink).save(one.state, NAME.step, share)
    directory.seal(storage, NAME, sink.files)
    return storage


def read(storage: LocalStorage, one: SpreadState) -> int:
    return saver_of(storage, one).load(NAME.folder, one.state, first=False)


@pytest.fixture(scope="module")
def trained() -> dict[str, list[SpreadState]]:
    units = {name: unit(layout) for name, layout in LAYOUTS.items()}
    for places in units.values():
        for one in places:
            one.train()
    return units


@pytest.fixture(scope="module")
def written(trained: dict[str, list[SpreadState]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, LocalStorage]:
    return {name: write(tmp_path_factory.mktemp("written"), places) for name, places in trained.items()}


@pytest.fixture(scope="module")
def whole(trained: dict[str, list[SpreadState]]) -> dict[str, torch.Tensor]:
    """Return the state without any layout, by name."""
    view = trained["whole"][0].state.capture()
    return dict(zip(stored_names(view.manifest), [t.clone() for t in view.tensors], strict=True))


@pytest.fixture(scope="module")
def readers() -> dict[str, list[SpreadState]]:
    return {name: unit(layout) for name, layout in LAYOUTS.items()}


def assert_here(one: SpreadState, whole: dict[str, torch.Tensor]) -> int:
    """Compare a local rank's share with a whole state; return the number of sharded tensors."""
    view = one.state.capture()
    names = stored_names(view.manifest)
    assert set(names) == set(whole)
    for number, (name, tensor) in enumerate(zip(names, view.tensors, strict=True)):
        box = find_box(name, view.spread.get(number, tensor), one.place)
        wanted = whole[name][box.slices_in(Box.of_whole(whole[name].shape))]
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted), name
    return len(view.spread)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_box_describes_the_local_shard_of_torch(layout: str) -> None:
    for one in unit(LAYOUTS[layout]):
        for name, parameter in one.model.named_parameters():
            assert torch.equal(local_of(parameter), one.here(name, one.whole[name])), name


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_each_layout_reads_checkpoints_of_every_other_layout(
    writer: str,
    reader: str,
    written: dict[str, LocalStorage],
    readers: dict[str, list[SpreadState]],
    whole: dict[str, torch.Tensor],
    trained: dict[str, list[SpreadState]],
) -> None:
    encoded = encode_manifest(trained["whole"][0].state.capture().manifest)
    # AdamW has two tensors for each parameter, and the average has one.
    spread = {"whole": 0, "tensor 2": 16}.get(reader, 32)
    for one in readers[reader]:
        one.forget()
        assert read(written[writer], one) == NAME.step
        assert assert_here(one, whole) == spread
        assert encode_manifest(one.state.capture().manifest) == encoded


@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_layout_writes_the_same_state(writer: str, written: dict[str, LocalStorage], tmp_path: Path) -> None:
    """Checked as one file joined without torch, and as torch's own format except for the order inside pickles."""
    files = [b"".join(join_into_file(written[name], NAME.folder, lambda _: True)[1]) for name in ("whole", writer)]
    assert files[0] == files[1]
    one, other = (read_state(written[name], NAME.folder, model_only=False) for name in ("whole", writer))
    torch.testing.assert_close(other, one, rtol=0, atol=0)
    stored = [written[name].folder / NAME.folder for name in ("whole", writer)]
    assert (stored[0] / "state.msgpack").read_bytes() == (stored[1] / "state.msgpack").read_bytes()
    # No tensor is written twice: apart from headers, the parts contain only the tensors' bytes.
    sizes = [sum(_bytes_of_tensors(path) for path in folder.glob("part-*")) for folder in stored]
    assert sizes[0] == sizes[1]


def _bytes_of_tensors(path: Path) -> int:
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_reader_of_torch_reads_sharded_checkpoints(
    written: dict[str, LocalStorage], whole: dict[str, torch.Tensor]
) -> None:
    wanted = {name: torch.empty_like(tensor) for name, tensor in whole.items()}
    load(wanted, storage_reader=HuggingFaceStorageReader(str(written[BOTH].folder / NAME.folder)), no_dist=True)
    for name, tensor in whole.items():
        assert torch.equal(wanted[name], tensor), name


def test_a_checkpoint_before_the_first_step_is_read(tmp_path: Path) -> None:
    """The optimizer has no state yet."""
    fresh, other = unit(Layout(shard=2)), unit(Layout(tensor=2))
    storage = write(tmp_path, fresh)
    for one in other:
        one.forget()
        read(storage, one)
        for name, parameter in one.model.named_parameters():
            assert torch.equal(local_of(parameter), one.here(name, one.whole[name]))
        assert not one.optimizer.state


def averaged_late(layout: Layout, copied: str = "") -> tuple[list[SpreadState], list[Late]]:
    """Return a replica group's states with an average of one parameter that was made late, or an empty one."""
    places, averages = unit(layout), list[Late]()
    for one in places:
        averages.append(Late())
        one.state = TrainingState(one.model, one.optimizer, {"late": averages[-1]})
        averages[-1].copies = [one.model.get_parameter(copied).detach().clone()] if copied else []
    return places, averages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lazily_created_average_is_read_under_its_own_layout(layout: str, tmp_path: Path) -> None:
    for copied in ("up.weight", "convolution.weight"):
        there, copies = averaged_late(LAYOUTS[layout], copied)
        storage = write(tmp_path / copied, there)
        for one, average, wanted in zip(*averaged_late(LAYOUTS[layout]), copies, strict=True):
            read(storage, one)
            (copy,), (made,) = average.copies, wanted.copies
            assert placement_of(copy) == placement_of(made)
            assert torch.equal(local_of(copy), local_of(made))


@pytest.mark.parametrize(("writer", "reader"), [("shard 2", "tensor 2"), ("tensor 2", BOTH), ("shard 2", BOTH)])
def test_a_lazily_created_average_is_refused_under_another_layout(writer: str, reader: str, tmp_path: Path) -> None:
    storage = write(tmp_path, averaged_late(LAYOUTS[writer], "up.weight")[0])
    with pytest.raises(BadInputError, match=r"extra\['late'\] has a tensor 'copies\.0' of the shape \(10, 5\)"):
        read(storage, averaged_late(LAYOUTS[reader])[0][0])


def test_a_checkpoint_of_another_model_is_refused(written: dict[str, LocalStorage]) -> None:
    other = SpreadState(Layout(), 0)
    other.model.down = torch.nn.Linear(10, 4)
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=0.1)
    state = type(other.state)(other.model, other.optimizer, {"average": other.average})
    with pytest.raises(BadInputError, match=r"down\.weight"):
        load_checkpoint(written[BOTH], NAME.folder, state)


# ---- damage ----

WEIGHT = "down.weight"  # Shape (5, 10): the first part of shard 2 x tensor 2 has a box of it that starts at (0, 0).


def spoil(storage: LocalStorage, change: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]) -> None:
    """Change the header of the part with the first box of a weight: its entry, all offsets, and all whole shapes."""
    for path in sorted((storage.folder / NAME.folder).glob("part-*")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        about = header["__metadata__"]
        offsets, shapes = json.loads(about["DCP_SHARDING_INFO"]), json.loads(about["holdfast whole shapes"])
        if offsets.get(WEIGHT, {}).get("saved_offsets") == [0, 0]:
            break
    else:
        pytest.fail(f"no part has the first box of {WEIGHT}")
    change(header[WEIGHT], offsets, shapes)
    about |= {"DCP_SHARDING_INFO": json.dumps(offsets), "holdfast whole shapes": json.dumps(shapes)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    reseal(path.parent)


def moved(offset: list[int]) -> Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]:
    return lambda entry, offsets, shapes: offsets[WEIGHT].update(saved_offsets=offset)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], None]] = {
    "over another box": moved([0, 5]),
    "beyond the tensor": moved([0, 6]),
    "before the tensor": moved([0, -1]),
    "one offset": moved([0]),
    "of a larger tensor": lambda entry, offsets, shapes: shapes.update({WEIGHT: [5, 11]}),
    "of a smaller tensor": lambda entry, offsets, shapes: shapes.update({WEIGHT: [2, 2]}),
    "turned": lambda entry, offsets, shapes: entry.update(shape=entry["shape"][::-1]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", ["whole", BOTH])
def test_a_box_with_wrong_bounds_is_reported_as_damage(
    change: str,
    reader: str,
    trained: dict[str, list[SpreadState]],
    readers: dict[str, list[SpreadState]],
    tmp_path: Path,
) -> None:
    storage = write(tmp_path, trained[BOTH], units=1)
    spoil(storage, CHANGES[change])
    for one in readers[reader]:
        with pytest.raises(DamagedCheckpointError, match=r"down\.weight|-1 stands where a size belongs"):
            read(storage, one)
    with pytest.raises(DamagedCheckpointError, match=r"down\.weight|-1 stands where a size belongs"):
        join_into_file(storage, NAME.folder, lambda _: True)


def test_a_missing_part_of_one_rank_is_reported_as_damage_by_all(
    trained: dict[str, list[SpreadState]], readers: dict[str, list[SpreadState]], tmp_path: Path
) -> None:
    storage = write(tmp_path, trained[BOTH], units=1)
    (storage.folder / NAME.folder / part_name(3, 4)).unlink()
    reseal(storage.folder / NAME.folder)
    for one in readers[BOTH]:
        with pytest.raises(DamagedCheckpointError, match="does not hold all of"):
            read(storage, one)
    with pytest.raises(DamagedCheckpointError, match="do not make one tensor"):
        join_into_file(storage, NAME.folder, lambda _: True)
