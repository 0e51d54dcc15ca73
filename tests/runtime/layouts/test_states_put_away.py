"""State stashed under one layout loads under each other layout, equal in every bit, and no more than needed is read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from spread_states import Late, Rows, SpreadState, unit

from holdfast.control.link.snapshots.files import DamagedPartError, StoredPart, part_path
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints.boxes import Box
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.state import Keeper, SnapshotPart, SnapshotSource
from holdfast.runtime.checkpoints.parts import stored_names
from holdfast.runtime.dtensor.local import is_dtensor, local_of, placement_of
from holdfast.runtime.layouts.boxes import find_box
from holdfast.runtime.snapshots.restoring import SnapshotLostError, SnapshotRestorer
from holdfast.runtime.snapshots.stashing import StashReader, stash_state
from holdfast.runtime.state.state import StateMismatchError, TrainingState

LAYOUTS = {
    "whole": Layout(),
    "shard 2": Layout(shard=2),
    "shard 4": Layout(shard=4),
    "shard 2 x tensor 2": Layout(shard=2, tensor=2),
}
STEP = 7


def fail_on_damage(*report: object) -> None:
    pytest.fail(f"unexpected damage: {report}")


def part_of(place: int, places: int) -> SnapshotPart:
    return SnapshotPart(term=1, generation=2, step=STEP, part=place, parts=places, seal=b"s" * 16, everywhere=True)


def put_all(folder: Path, layout: Layout) -> list[SpreadState]:
    folder.mkdir(exist_ok=True)
    places = unit(layout)
    for number, one in enumerate(places):
        one.train()
        stash_state(one.state, one.place, folder, "job", part_of(number, len(places)))
    return places


def source_of(places: int, nodes: int = 1) -> SnapshotSource:
    keepers = tuple(Keeper(node=f"n{number}", host="127.0.0.1", port=1) for number in range(nodes))
    return SnapshotSource(
        term=1,
        generation=2,
        step=STEP,
        seal=b"s" * 16,
        keepers=keepers,
        parts=tuple(tuple(range(nodes)) for _ in range(places)),
        everywhere=True,
    )


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_each_layout_restores_the_stashed_state_of_every_other_layout(writer: str, reader: str, tmp_path: Path) -> None:
    whole = put_all(tmp_path / "one", LAYOUTS["whole"])[0].state.capture()
    known = dict(zip(stored_names(whole.manifest), whole.tensors, strict=True))
    places = len(put_all(tmp_path / "here", LAYOUTS[writer]))
    for rank, one in enumerate(unit(LAYOUTS[reader])):
        one.forget()
        restorer = SnapshotRestorer(tmp_path / "here", "job", "n0/0/a", fail_on_damage, one.place)
        assert restorer.restore(source_of(places), one.state, rank) == STEP
        assert restorer.moved_bytes == 0
        view = one.state.capture()
        for number, (name, tensor) in enumerate(zip(stored_names(view.manifest), view.tensors, strict=True)):
            box = find_box(name, view.spread.get(number, tensor), one.place)
            assert torch.equal(tensor, known[name][box.slices_in(Box.of_whole(known[name].shape))]), name


def test_a_damaged_part_is_reported_and_its_state_is_lost(tmp_path: Path) -> None:
    put_all(tmp_path, Layout(shard=2))
    file = part_path(tmp_path, part_of(1, 2))
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    places, reported = unit(Layout(shard=4)), list[tuple[int, str]]()

    def restorer(one: SpreadState) -> SnapshotRestorer:
        def tell(snapshot: SnapshotPart, node: str, _: str) -> None:
            reported.append((snapshot.part, node))

        return SnapshotRestorer(tmp_path, "job", "n0/0/a", tell, one.place)

    assert restorer(places[0]).restore(source_of(2), places[0].state, 0) == STEP, (
        "rank 0 needs nothing from the damaged part"
    )
    with pytest.raises(SnapshotLostError, match="no copy of part 1 of 2"):
        restorer(places[3]).restore(source_of(2), places[3].state, 3)
    assert reported == [(1, "n0")]


def test_parts_of_different_states_are_not_combined(tmp_path: Path) -> None:
    places = put_all(tmp_path, Layout(shard=2))
    places[1].average.state["decay"] = 0.5
    stash_state(places[1].state, places[1].place, tmp_path, "job", part_of(1, 2))
    filling = StashReader(unit(Layout())[0].state, unit(Layout())[0].place)
    first, second = (StoredPart(part_path(tmp_path, part_of(number, 2)), "job") for number in range(2))
    filling.read_part(first)
    with pytest.raises(DamagedPartError, match="another state than the other parts"):
        filling.read_part(second)
    first.close()
    second.close()


def with_rows(layout: Layout) -> list[SpreadState]:
    places = unit(layout)
    for one in places:
        one.optimizer = Rows(one.model.parameters())
        one.state = TrainingState(one.model, one.optimizer, {"average": one.average})
    return places


@pytest.mark.parametrize("reader", LAYOUTS)
@pytest.mark.parametrize("writer", LAYOUTS)
def test_optimizer_state_of_another_shape_uses_the_mesh_of_its_parameter(
    writer: str, reader: str, tmp_path: Path
) -> None:
    """It gets the placement that torch derives for it; otherwise the next step would mix incompatible tensors."""
    (tmp_path / "here").mkdir()
    there = with_rows(LAYOUTS[writer])
    for number, one in enumerate(there):
        one.optimizer.step()
        stash_state(one.state, one.place, tmp_path / "here", "job", part_of(number, len(there)))
    for rank, one in enumerate(with_rows(LAYOUTS[reader])):
        SnapshotRestorer(tmp_path / "here", "job", "n0/0/a", fail_on_damage, one.place).restore(
            source_of(len(there)), one.state, rank
        )
        again = with_rows(LAYOUTS[reader])[rank]
        again.optimizer.step()
        pairs = zip(one.model.parameters(), again.model.parameters(), strict=True)
        for kept, made in ((one.optimizer.state[p], again.optimizer.state[q]) for p, q in pairs):
            assert placement_of(kept["rows"]) == placement_of(made["rows"])
            assert torch.equal(local_of(kept["rows"]), local_of(made["rows"]))
            assert not is_dtensor(kept["step"])
            assert not is_dtensor(kept.get("seen", kept["step"])), "a plain tensor must stay plain"
        # A worker that receives the state has no tensor that is sharded in this way.
        joiner = with_rows(LAYOUTS[reader])[rank]
        view = one.state.capture()
        joiner.state.adopt(view.manifest, [tensor.clone() for tensor in view.tensors])
        kept = joiner.optimizer.state[joiner.model.up.weight]["rows"]
        assert placement_of(kept) == placement_of(one.optimizer.state[one.model.up.weight]["rows"])


def test_a_state_with_a_lazily_created_average_cannot_be_stashed(tmp_path: Path) -> None:
    place = unit(Layout(shard=2))[0]
    late = Late()
    state = TrainingState(place.model, place.optimizer, {"late": late})
    assert state.find_late_tensor() == ""
    late.copies = [place.model.up.weight.detach().clone()]
    with pytest.raises(BadInputError, match=r"extra\['late'\]: copies\.0 was made after job\.protect\(\)"):
        stash_state(state, place.place, tmp_path, "job", part_of(0, 2))
    assert not list(tmp_path.iterdir())
    plain = unit(Layout())[0]
    average = Late()
    whole = TrainingState(plain.model, plain.optimizer, {"late": average})
    average.copies = [torch.zeros(4)]
    assert whole.find_late_tensor() == "", "the tensor resembles no parameter"
    average.copies = [plain.model.up.weight.detach().clone()]
    assert whole.find_late_tensor() == "extra['late']: copies.0"


def test_the_error_for_another_model_describes_the_difference() -> None:
    place = unit(LAYOUTS["shard 2"])[0]
    state = TrainingState(place.model, place.optimizer)
    here = state.capture().manifest
    first = here.tensors[0]
    changed = msgspec.structs.replace(first, whole=(), placed="", shape=(77,))
    there = msgspec.structs.replace(here, tensors=(changed, *here.tensors[1:]))
    message = (
        rf"{first.name} is float\d\d of shape \(.*\), spread as shard S\(0\) here and float\d\d of shape \(77,\) there"
    )
    with pytest.raises(StateMismatchError, match=message):
        state.prepare(there)
