"""A state split over members and reassembled: in this process, from files, and from snapshot servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.control.agent.snapshots.part_server import SnapshotServer
from holdfast.control.link.snapshots.files import part_path
from holdfast.protocol.messages.worker import SnapshotDamaged, SnapshotLeftOut, SnapshotTaken
from holdfast.protocol.plan import GenerationPlan, Member
from holdfast.protocol.state import Keeper, SnapshotSource, seal_of
from holdfast.runtime.moe.expert_shards.job_experts import JobExperts, make_job_experts
from holdfast.runtime.moe.expert_shards.saving import hosted_pairs, named_rows
from holdfast.runtime.snapshots import taking
from holdfast.runtime.snapshots.cutting import copy_range, part_range
from holdfast.runtime.snapshots.restoring import SnapshotLostError, SnapshotRestorer
from holdfast.runtime.snapshots.snapshots import Snapshots
from holdfast.runtime.state.state import TrainingState, state_hash

KEY = b"k" * 32
SECRET = b"p" * 32
DEADLINE_S = 60.0


def make(seed: int, width: int = 120) -> TrainingState:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return TrainingState(model, optimizer)


class Node:
    """A worker and its agent's folder, in this process."""

    def __init__(
        self, folder: Path, name: str, state: TrainingState, every: int = 10, experts: JobExperts | None = None
    ) -> None:
        folder.mkdir()
        self.name, self.folder, self.state = name, folder, state
        self.worker = f"{name}/0/a"
        self.reports: list[SnapshotTaken | SnapshotLeftOut | SnapshotDamaged] = []
        self.snapshots = Snapshots(
            folder=folder,
            job="job",
            worker=self.worker,
            every=every,
            state=state,
            send=self.reports.append,
            experts=experts,
        )
        self.door = SnapshotServer("127.0.0.1", folder, "job", lambda: KEY)
        self.keeper = Keeper(node=name, host="127.0.0.1", port=self.door.start())

    def close(self) -> None:
        self.snapshots.close()
        self.door.close()


class Job:
    """Nodes that have taken a snapshot of the same state together."""

    def __init__(self, folder: Path, size: int, state: TrainingState) -> None:
        self.nodes = [Node(folder / f"n{place}", f"n{place}", state) for place in range(size)]
        members = tuple(Member(worker=node.worker, host="127.0.0.1", state_port=1) for node in self.nodes)
        self.plan = GenerationPlan(term=1, generation=2, members=members, secret=SECRET)
        for node in self.nodes:
            node.snapshots.on_step_applied(self.plan, 10)
            node.snapshots.wait_copied()
            node.snapshots.close()

    def source(self, *places: tuple[int, ...]) -> SnapshotSource:
        return SnapshotSource(
            term=1,
            generation=2,
            step=10,
            seal=seal_of(SECRET),
            keepers=tuple(node.keeper for node in self.nodes),
            parts=places or tuple((place,) for place in range(len(self.nodes))),
            key=KEY,
        )

    def flip(self, node: int, part: int) -> None:
        path = part_path(self.nodes[node].folder, self.source().part(part))
        data = bytearray(path.read_bytes())
        data[100] ^= 16
        path.write_bytes(data)

    def copy(self, part: int, there: int) -> None:
        name = self.source().part(part)
        part_path(self.nodes[there].folder, name).write_bytes(part_path(self.nodes[part].folder, name).read_bytes())


@pytest.fixture
def job(tmp_path: Path) -> Callable[[int], Job]:
    made: list[Job] = []

    def make_job(size: int) -> Job:
        made.append(Job(tmp_path, size, make(1)))
        return made[-1]

    yield make_job
    for one in made:
        for node in one.nodes:
            node.close()


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1000, 4096])
def test_each_byte_is_in_exactly_one_part(parts: int, nbytes: int) -> None:
    ranges = [part_range(nbytes, part, parts) for part in range(parts)]
    assert [byte for first, last in ranges for byte in range(first, last)] == list(range(nbytes))


def test_byte_ranges_refer_to_the_concatenated_tensors() -> None:
    tensors = [torch.arange(5), torch.zeros(0), torch.ones(3, 4).t(), torch.tensor(True), torch.tensor(7.0)]
    whole = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)
    for start in range(0, len(whole), 3):
        for end in range(start, len(whole) + 1, 5):
            target = torch.zeros(end - start, dtype=torch.uint8)
            copy_range(tensors, start, target)
            assert target.numpy().tobytes() == whole[start:end]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_worker_restores_the_full_state_from_all_parts(
    job: Callable[[int], Job], size: int, tmp_path: Path
) -> None:
    snapped = job(size)
    for node in snapped.nodes:
        (taken,) = node.reports
        assert isinstance(taken, SnapshotTaken)
        assert taken.bytes == part_path(node.folder, taken.snapshot).stat().st_size
    other = Node(tmp_path / "other", "other", make(2))
    assert other.snapshots.restore(snapped.source(), snapped.plan, 0) == 10
    assert state_hash(other.state.capture()) == state_hash(snapped.nodes[0].state.capture())
    assert other.reports == []
    other.close()


def test_a_copy_replaces_a_damaged_part_and_the_damage_is_reported(job: Callable[[int], Job]) -> None:
    snapped = job(3)
    snapped.copy(1, 2)
    snapped.flip(1, 1)
    expected = state_hash(snapped.nodes[0].state.capture())
    reader = snapped.nodes[0]
    reader.reports.clear()
    with torch.no_grad():
        next(reader.state.model.parameters()).zero_()
    assert reader.snapshots.restore(snapped.source((0,), (1, 2), (2,)), snapped.plan, 0) == 10
    assert state_hash(reader.state.capture()) == expected
    (report,) = reader.reports
    assert isinstance(report, SnapshotDamaged)
    assert (report.node, report.snapshot.part) == ("n1", 1)
    assert "checksum" in report.why


def test_a_snapshot_is_lost_if_a_part_has_no_intact_copy(job: Callable[[int], Job]) -> None:
    snapped = job(2)
    snapped.flip(0, 0)
    snapped.nodes[1].door.close()
    reader = snapped.nodes[0]
    reader.reports.clear()
    with pytest.raises(SnapshotLostError):
        reader.snapshots.restore(snapped.source(), snapped.plan, 1)
    assert {report.node for report in reader.reports if isinstance(report, SnapshotDamaged)} == {"n1"}
    with pytest.raises(SnapshotLostError):
        reader.snapshots.restore(snapped.source(), snapped.plan, 0)
    assert {report.node for report in reader.reports if isinstance(report, SnapshotDamaged)} == {"n0", "n1"}


def test_a_snapshot_that_contains_a_nan_is_reported_as_unusable(tmp_path: Path) -> None:
    state = make(1)
    with torch.no_grad():
        next(state.model.parameters())[3, 3] = float("nan")
    snapped = Job(tmp_path, 1, state)
    node = snapped.nodes[0]
    node.reports.clear()
    with pytest.raises(SnapshotLostError, match=r"0\.weight contains a NaN"):
        node.snapshots.restore(snapped.source(), snapped.plan, 0)
    (report,) = node.reports
    assert isinstance(report, SnapshotDamaged)
    assert report.node == "", "the whole snapshot must be reported as unusable"
    node.close()


def test_a_snapshot_of_another_model_is_refused(job: Callable[[int], Job], tmp_path: Path) -> None:
    snapped = job(1)
    other = Node(tmp_path / "other", "other", make(2, width=64))
    with pytest.raises(SnapshotLostError, match="not of this model"):
        other.snapshots.restore(snapped.source(), snapped.plan, 0)
    other.close()


def test_a_lack_of_memory_for_snapshots_is_reported_once(tmp_path: Path) -> None:
    node = Node(tmp_path / "n0", "n0", make(1), every=1)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    node.folder.rmdir()
    for step in (1, 2):
        node.snapshots.on_step_applied(plan, step)
        node.snapshots.wait_copied()
        node.snapshots.wait()
    (report,) = node.reports
    assert isinstance(report, SnapshotLeftOut)
    assert report.step == 1
    node.folder.mkdir()
    node.snapshots.on_step_applied(plan, 3)
    node.snapshots.close()
    assert isinstance(node.reports[-1], SnapshotTaken)
    node.door.close()


def test_reasons_that_differ_only_in_free_bytes_are_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that differ only in the free bytes are logged once; another reason is logged again."""
    node = Node(tmp_path / "n0", "n0", make(1), every=1)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    reasons = [
        "/dev/shm has no room for 64 bytes: 60 are free for use",
        "/dev/shm has no room for 64 bytes: 7 are free for use",
    ]
    refusals = iter([*reasons, "it is read-only"])

    def no_room(folder: Path, nbytes: int) -> Any:
        raise OSError(next(refusals))

    monkeypatch.setattr(taking, "PartWriter", no_room)
    for step in (1, 2, 3):
        node.snapshots.on_step_applied(plan, step)
        node.snapshots.wait_copied()
        node.snapshots.wait()
    report = [(report.step, report.why) for report in node.reports if isinstance(report, SnapshotLeftOut)]
    assert report == [(1, reasons[0]), (3, "it is read-only")]
    node.close()


def test_a_snapshot_due_during_the_previous_write_is_skipped_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path / "n0", "n0", make(1), every=1)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    go = threading.Event()

    def slowly(tensors: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
        assert go.wait(DEADLINE_S)
        copy_range(tensors, start, target)

    monkeypatch.setattr(taking, "copy_range", slowly)
    for step in (1, 2, 3):
        node.snapshots.on_step_applied(plan, step)
    (report,) = node.reports
    assert isinstance(report, SnapshotLeftOut)
    assert (report.step, report.why) == (2, "the one before it is still being written")
    go.set()
    node.snapshots.wait_copied()
    node.snapshots.wait()
    assert isinstance(node.reports[-1], SnapshotTaken)
    node.close()


def test_the_state_changes_only_after_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "n0", "n0", make(1), every=1)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    expected, go, settled = state_hash(node.state.capture()), threading.Event(), threading.Event()

    def slowly(tensors: Sequence[torch.Tensor], start: int, target: torch.Tensor) -> None:
        assert go.wait(DEADLINE_S)
        copy_range(tensors, start, target)

    monkeypatch.setattr(taking, "copy_range", slowly)

    def apply() -> None:
        node.snapshots.wait_copied()
        settled.set()
        with torch.no_grad():
            for parameter in node.state.model.parameters():
                parameter.zero_()

    node.snapshots.on_step_applied(plan, 1)
    training = threading.Thread(target=apply)
    training.start()
    assert not settled.wait(0.1)
    go.set()
    training.join(DEADLINE_S)
    node.snapshots.wait()
    source = SnapshotSource(
        term=1, generation=1, step=1, seal=seal_of(SECRET), keepers=(node.keeper,), parts=((0,),), key=KEY
    )
    assert node.snapshots.restore(source, plan, 0) == 1
    assert state_hash(node.state.capture()) == expected
    node.close()


def test_snapshots_are_taken_only_at_due_steps(tmp_path: Path) -> None:
    node = Node(tmp_path / "n0", "n0", make(1), every=4)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    for step in range(1, 10):
        node.snapshots.on_step_applied(plan, step)
        node.snapshots.wait_copied()
        node.snapshots.wait()
    node.close()
    assert [report.snapshot.step for report in node.reports if isinstance(report, SnapshotTaken)] == [4, 8]


def with_experts(seed: int) -> tuple[TrainingState, JobExperts]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), holdfast.MoE(6, 12, 5, 2), holdfast.MoE(6, 12, 5, 1, layer=1))
    optimizer = torch.optim.AdamW(model.parameters())
    experts = make_job_experts(model, optimizer)
    assert experts is not None
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    apart = [weight for layer in experts.layers for weight in layer.experts.weights().values()]
    return TrainingState(model, optimizer, apart=apart), experts


def rows_by_name(experts: JobExperts) -> dict[str, torch.Tensor]:
    return {name: row.clone() for name, row in named_rows(experts.shards, hosted_pairs(experts.shards)).items()}


def test_experts_are_restored_by_their_new_hosts(tmp_path: Path) -> None:
    state, experts = with_experts(1)
    node = Node(tmp_path / "n0", "n0", state, experts=experts)
    snapped = Job(tmp_path, 0, state)
    snapped.nodes = [node]
    plan = GenerationPlan(
        term=1, generation=2, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    node.snapshots.on_step_applied(plan, 10)
    node.snapshots.close()
    expected = rows_by_name(experts)
    other_state, others = with_experts(2)
    folder = tmp_path / "other"
    folder.mkdir()
    restorer = SnapshotRestorer(folder, "job", "other/0/b", lambda *_: pytest.fail("all parts are complete"))
    wanted = ((1, 4), (0,))
    assert restorer.restore(snapped.source(), other_state, 0, others, wanted) == 10
    assert others.shards.hosted == wanted
    assert state_hash(other_state.capture()) == state_hash(state.capture())
    came = rows_by_name(others)
    assert len(came) == 3 * len(others.describe_layers()[0].rows)
    for name, row in came.items():
        assert torch.equal(row, expected[name]), name
    _, smaller = with_experts(3)
    with pytest.raises(SnapshotLostError, match="expert 7 of MoE layer 1 is in none"):
        SnapshotRestorer(folder, "job", "other/0/b", lambda *_: None).restore(
            snapped.source(), other_state, 0, smaller, ((0,), (7,))
        )
    node.door.close()


class Place:
    """A script's own object: the position in a data stream."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, torch.arange(at)

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at, "seen": self.seen, "names": ["a", {"b": None}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seen = state["at"], state["seen"]


def featured(seed: int) -> TrainingState:
    """Return a state with every kind of object that a dense script may use."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2).half())
    one = torch.optim.SGD(model[0].parameters(), lr=0.1 * seed, momentum=0.9)
    two = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for _ in range(seed):
        one.step()
        two.step()
        model[1](torch.randn(4, 9))
    schedule = torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.5**step)
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
    extra = {"schedule": schedule, "average": average, "scaler": scaler, "place": Place(7 * seed)}
    return TrainingState(model, {"one": one, "two": two}, extra)


def test_the_state_of_every_feature_is_restored_bit_identically(tmp_path: Path) -> None:
    state, other = featured(3), featured(1)
    snapped = Job(tmp_path, 3, state)
    reader = Node(tmp_path / "reader", "reader", other)
    assert state_hash(other.capture()) != state_hash(state.capture())
    assert reader.snapshots.restore(snapped.source(), snapped.plan, 1) == 10
    assert state_hash(other.capture()) == state_hash(state.capture())
    assert other.extra["place"].at == 21
    for node in (*snapped.nodes, reader):
        node.close()


def test_the_next_part_reuses_prepared_memory_and_none_is_left_behind(tmp_path: Path) -> None:
    node = Node(tmp_path / "n0", "n0", make(1), every=1)
    plan = GenerationPlan(
        term=1, generation=1, members=(Member(worker=node.worker, host="h", state_port=1),), secret=SECRET
    )
    node.snapshots.on_step_applied(plan, 1)
    node.snapshots.wait()
    (ready,) = node.folder.glob(".writing-*")
    inode = ready.stat().st_ino
    node.snapshots.on_step_applied(plan, 2)
    node.snapshots.close()
    (second,) = node.folder.glob("step-00000002-*")
    assert second.stat().st_ino == inode
    assert len(list(node.folder.iterdir())) == 2
    node.door.close()
