"""In a snapshot, a member stores its share of its own role's state, and reads only parts of its own role."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spread_states import Late, unit

from holdfast.control.link.snapshots.files import StoredPart, part_path
from holdfast.protocol.layouts.layout import Layout
from holdfast.protocol.messages.worker import SnapshotDamaged, SnapshotLeftOut, SnapshotTaken
from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.protocol.state import Keeper, SnapshotSource, seal_of
from holdfast.runtime.dtensor.local import TensorPlacement, local_of, placement_of, wrap_like
from holdfast.runtime.dtensor.replica_position import ReplicaPosition
from holdfast.runtime.snapshots.cutting import ALIGNMENT
from holdfast.runtime.snapshots.restoring import SnapshotLostError
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.state import TrainingState, state_hash

LAYOUT = Layout(shard=2, tensor=2)
UNITS = 2
SECRET = b"s" * 32
MEMBERS = tuple(
    Member(worker=f"n/{rank}/a", host="h", state_port=1, role=LAYOUT.role_of(rank))
    for rank in range(UNITS * LAYOUT.places)
)
PLAN = GenerationPlan(term=1, generation=2, members=MEMBERS, secret=SECRET)

Reports = list[SnapshotTaken | SnapshotDamaged]


def snapshots_of_one(
    folder: Path, rank: int, state: TrainingState, place: ReplicaPosition, reports: Reports | None = None
) -> Snapshots:
    tell = (reports if reports is not None else []).append
    worker = MEMBERS[rank].worker
    return Snapshots(folder=folder, job="job", worker=worker, every=1, state=state, send=tell, position=place)


def source(parts: int) -> SnapshotSource:
    """Return a snapshot that is on the only node of these tests."""
    there = Keeper(node="n", host="h", port=1)
    return SnapshotSource(term=1, generation=2, step=3, seal=seal_of(SECRET), keepers=(there,), parts=((0,),) * parts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder with the parts of all members of two replica groups."""
    for rank, one in enumerate(unit(LAYOUT) * UNITS):
        if not rank // LAYOUT.places:
            one.train()
        reports: Reports = []
        taker = snapshots_of_one(tmp_path, rank, one.state, one.place, reports)
        taker.on_step_applied(PLAN, 3)
        taker.wait_copied()
        taker.close()
        (taken,) = reports
        assert isinstance(taken, SnapshotTaken)
        assert (taken.snapshot.part, taken.snapshot.parts) == (rank, len(MEMBERS))
    return tmp_path


def test_each_rank_restores_from_the_parts_of_its_local_rank_only(folder: Path) -> None:
    whole, places = unit(LAYOUT), unit(LAYOUT)
    for one in whole:
        one.train()
    for place, one in enumerate(places):
        kept = {}
        for rank in range(len(MEMBERS)):
            if rank % LAYOUT.places != place:
                path = part_path(folder, source(len(MEMBERS)).part(rank))
                kept[path] = path.read_bytes()
                path.unlink()
        reader = snapshots_of_one(folder, place, one.state, one.place)
        assert reader.restore(source(len(MEMBERS)), PLAN, place) == 3
        reader.close()
        assert state_hash(one.state.capture()) == state_hash(whole[place].state.capture())
        assert one.state.capture().manifest == whole[place].state.capture().manifest
        for path, data in kept.items():
            path.write_bytes(data)


def test_a_part_is_an_equal_share_of_the_state_of_its_local_rank(folder: Path) -> None:
    for place, one in enumerate(unit(LAYOUT)):
        one.train(1)
        sizes: list[int] = []
        for rank in range(place, len(MEMBERS), LAYOUT.places):
            part = StoredPart(part_path(folder, source(len(MEMBERS)).part(rank)), "job")
            sizes.append(part.header.body_bytes)
            part.close()
        assert sum(sizes) == one.state.capture().nbytes
        assert abs(sizes[0] - sizes[1]) <= 2 * ALIGNMENT


def test_a_snapshot_of_another_layout_is_reported_as_unusable(folder: Path) -> None:
    (one, *_), reports = unit(LAYOUT), []
    reader = snapshots_of_one(folder, 0, one.state, one.place, reports)
    with pytest.raises(SnapshotLostError, match="belong to another layout"):
        reader.restore(source(6), PLAN, 0)
    reader.close()
    (complained,) = reports
    assert isinstance(complained, SnapshotDamaged)
    assert complained.node == "", "the whole snapshot must be reported as unusable"


def test_a_sharded_tensor_of_an_extra_keeps_its_placement() -> None:
    """No model tensor has this shape; a joining worker would otherwise refuse it, or begin with plain tensors."""
    for place, one in enumerate(unit(Layout(shard=2))):
        like = next(one.model.parameters())
        one.average.state["sums"] = wrap_like(torch.arange(3.0) + place, like, (6,))
        view = one.state.capture()
        tensors = [tensor.clone() for tensor in view.tensors]
        one.average.state["sums"] = wrap_like(torch.zeros(3), like, (6,))
        one.state.adopt(view.manifest, tensors)
        sums = one.average.state["sums"]
        assert placement_of(sums) == TensorPlacement((6,), placement_of(like).placed)
        assert local_of(sums).tolist() == [place, place + 1.0, place + 2.0]


def test_a_state_that_can_never_be_stashed_is_reported_as_such(tmp_path: Path) -> None:
    """A retry does not help for an average that was made late, but may help if a node has no room."""
    late, one = Late(), unit(LAYOUT)[0]
    state = TrainingState(one.model, one.optimizer, {"late": late})
    late.copies = [one.model.up.weight.detach().clone()]
    reports: list[SnapshotTaken | SnapshotLeftOut | SnapshotDamaged] = []
    kept = Snapshots(
        folder=tmp_path,
        job="job",
        worker=MEMBERS[0].worker,
        every=0,
        state=state,
        send=reports.append,
        position=one.place,
    )
    kept.stash(PLAN, 3)
    late.copies = []
    tmp_path.rmdir()
    kept.stash(PLAN, 4)
    assert [(left_out.step, left_out.lasting) for left_out in reports if isinstance(left_out, SnapshotLeftOut)] == [
        (3, True),
        (4, False),
    ]
