"""The API in a world of one: the behaviour that a script sees without an agent."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.clock import SystemClock
from holdfast.control.link.progress_page import NoProgress
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.coordination.worker.machine import WorkerMachine
from holdfast.coordination.worker.tasks import WorkerInstruction
from holdfast.errors import BadInputError, HoldfastError, JobFailedError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.protocol.checkpoints.names import CheckpointName, StoredFile
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec
from holdfast.protocol.messages import any_side as msg
from holdfast.runtime.checkpoints.saver import SAMPLES
from holdfast.runtime.session.applying import StepApplier
from holdfast.runtime.session.job import Job
from holdfast.runtime.session.session import Session
from holdfast.runtime.session.solo import SoloLink
from holdfast.runtime.session.step import Step
from holdfast.storage import Chunk, LocalStorage, Storage
from resealing import reseal

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Trained:
    """A small job and its record."""

    def __init__(self, directory: Path | str = "", *, every: int = 4, model: torch.nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.job = Job(None, checkpoint_dir=str(directory), checkpoint_every=every)
        self.losses: dict[int, float] = {}
        self.samples: list[int] = []

    def protect(self, **options: Any) -> None:
        arguments: dict[str, Any] = {"global_batch": 6, "micro_batch": 2, **options}
        dataset = arguments.pop("dataset", DATA)
        extra = arguments.pop("extra", {"schedule": self.schedule})
        self.job.protect(self.model, self.optimizer, dataset, extra=extra, **arguments)

    def close(self) -> None:
        """Release the resources of an abandoned loop."""
        assert self.job._session is not None
        self.job._session.close()

    def run(self, steps: int, **options: Any) -> Trained:
        self.protect(**options)
        for step in self.job.steps(steps):
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.mse_loss(self.model(x), y))
            assert step.apply()
            self.losses[step.number] = step.loss
        return self


def test_a_job_trains_like_plain_pytorch() -> None:
    """The same samples, clipping and schedule by hand, in float64: the same parameters."""

    def fresh() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Linear(4, 1).double()

    data = TensorDataset(X.double(), X.double().sum(1, keepdim=True))
    ours = Trained(model=fresh())
    ours.run(8, dataset=data, max_grad_norm=0.5)
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert ours.job._session is not None
    order = ours.job._session.workload.loader.order
    for number in range(1, 9):
        places = [place for part in range(3) for place in order.indices(number, part)]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data.tensors[0][places]), data.tensors[1][places])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        assert ours.losses[number] == pytest.approx(loss.item(), rel=1e-12)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=0)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_dropout_matches_plain_pytorch_seeded_by_step_and_micro_batch() -> None:
    """Plain PyTorch seeds itself by the documented rule: a hash of the job's seed, the step and the micro-batch."""

    def fresh() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)).double()

    def seed_of(step: int, micro_batch: int) -> int:
        packed = struct.pack("<QQQ", 7, step, micro_batch)
        digest = hashlib.blake2b(packed, digest_size=8, person=b"hf-stream").digest()
        return int.from_bytes(digest, "little")

    data = TensorDataset(X.double(), X.double().sum(1, keepdim=True))
    ours = Trained(model=fresh())
    masks: dict[tuple[int, int], tuple[bool, ...]] = {}
    numbers = iter([(step, number) for step in range(1, 6) for number in range(3)])
    ours.model[1].register_forward_hook(  # type: ignore[index] - a Sequential
        lambda _module, _given, made: masks.__setitem__(next(numbers), tuple((made == 0.0).flatten().tolist()))
    )
    ours.run(5, dataset=data, seed=7)
    assert len(set(masks.values())) == 15, "each micro-batch must have its own randomness"
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert ours.job._session is not None
    order = ours.job._session.workload.loader.order
    for step in range(1, 6):
        optimizer.zero_grad()
        losses: list[float] = []
        for number in range(3):
            samples = order.indices(step, number)
            torch.manual_seed(seed_of(step, number))
            loss = torch.nn.functional.mse_loss(model(data.tensors[0][samples]), data.tensors[1][samples])
            (loss / 3).backward()
            losses.append(loss.item())
        optimizer.step()
        schedule.step()
        assert ours.losses[step] == pytest.approx(sum(losses) / 3, rel=1e-12)
    for mine, theirs in zip(ours.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_rank_world_size_and_gradient_norm_are_exposed(tmp_path: Path) -> None:
    trained = Trained()
    assert (trained.job.rank, trained.job.world_size) == (0, 1)
    trained.protect(max_grad_norm=1e-9)
    for step in trained.job.steps(1):
        for x, y in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(trained.model(x), y))
        step.apply()
        assert step.applied
        assert step.grad_norm > 1e-3
        clipped = torch.nn.utils.get_total_norm([p.grad for p in trained.model.parameters() if p.grad is not None])
        assert float(clipped) == pytest.approx(1e-9, rel=1e-2)


def test_a_resumed_job_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Trained().run(11).losses
    first = Trained(tmp_path).run(9).losses
    second = Trained(tmp_path).run(11).losses
    assert first == {step: whole[step] for step in range(1, 10)}
    assert second == {step: whole[step] for step in (10, 11)}


def test_the_last_checkpoint_is_saved_while_another_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The previous checkpoint is still being written when the loop ends."""
    honest = checkpoint_dir.write_file
    last = threading.Event()

    def held(storage: Storage, checkpoint: str, name: str, chunks: Iterable[Chunk]) -> StoredFile:
        if "step-00000004" in checkpoint:
            assert last.wait(60.0)
        return honest(storage, checkpoint, name, chunks)

    def finishing(applying: StepApplier) -> None:
        last.set()
        finish(applying)

    finish = StepApplier.finish_loop
    monkeypatch.setattr(checkpoint_dir, "write_file", held)
    monkeypatch.setattr(StepApplier, "finish_loop", finishing)
    Trained(tmp_path).run(8)
    saved = [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))]
    assert saved in ([4, 8], [8])  # The last save does not wait for an earlier one, which may be dropped.
    Trained(tmp_path).run(8)  # There is nothing left to do or to save.
    assert [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))] == saved


def train_to_4_and_8(folder: Path) -> None:
    """Keep checkpoints of both steps. In one run, the first is dropped if the second is complete before it."""
    for steps in (4, 8):
        Trained(folder).run(steps)


def test_a_damaged_checkpoint_is_logged_and_the_previous_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_to_4_and_8(tmp_path)
    found = checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))
    assert [(name.term, name.step) for name in found] == [(1, 4), (2, 8)]
    names = [name.folder for name in found]
    (tmp_path / names[1] / checkpoint_dir.MANIFEST).write_text("{")
    with caplog.at_level(logging.WARNING):
        assert sorted(Trained(tmp_path).run(4).losses) == []
    assert any("the checkpoint before it is used" in record.message for record in caplog.records)
    (tmp_path / names[0] / checkpoint_dir.MANIFEST).unlink()
    with pytest.raises(JobFailedError, match="no checkpoint in"):
        Trained(tmp_path).run(6)


def test_a_forged_checkpoint_is_refused_and_the_previous_one_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An attacker who can write to the directory can also make the manifest match the files."""
    train_to_4_and_8(tmp_path)

    def spoil(step: int) -> None:
        (checkpoint,) = tmp_path.glob(f"step-{step:08d}-*")
        (part,) = checkpoint.glob("part-*")
        part.write_bytes(pickle.dumps(print))
        reseal(checkpoint)

    spoil(8)
    with caplog.at_level(logging.WARNING):
        assert sorted(Trained(tmp_path).run(4).losses) == []
    logged = [record.message for record in caplog.records if "the checkpoint before it is used" in record.message]
    assert len(logged) == 1
    assert "holds no tensors" in logged[0]
    spoil(4)
    with pytest.raises(JobFailedError, match=r"no checkpoint in .*holds no tensors"):
        Trained(tmp_path).run(6)


def test_a_data_set_of_another_length_is_refused_on_resume(tmp_path: Path) -> None:
    Trained(tmp_path).run(4)
    shorter = TensorDataset(X[:15], X[:15].sum(1, keepdim=True))
    with pytest.raises(BadInputError, match="samples in the data set was 20 and is 15"):
        Trained(tmp_path).run(8, dataset=shorter)


class Walk:
    """A stream per micro-batch, with its position as its state."""

    def open(self, micro_batch: int, micro_batches: int) -> Walk:
        self.at = micro_batch
        self.stride = micro_batches
        return copy.copy(self)

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(self.at % 20, self.at % 20 + 2)
        self.at += self.stride
        return X[rows], X[rows].sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 1])
def test_data_streams_resume_at_their_position_in_the_checkpoint(
    tmp_path: Path, workers: int, warm_torch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Trained().run(11, dataset=Walk()).losses
    made = Job.__init__

    def with_zygote(job: Job, *arguments: Any, **options: Any) -> None:
        made(job, *arguments, **options)
        job._zygote = warm_torch

    monkeypatch.setattr(Job, "__init__", with_zygote)
    first = Trained(tmp_path).run(9, dataset=Walk(), num_workers=workers).losses
    second = Trained(tmp_path).run(11, dataset=Walk(), num_workers=workers).losses
    assert first | second == whole
    assert sorted(second) == [10, 11]
    with pytest.raises(BadInputError, match="samples in the data set was 0 and is 20"):
        Trained(tmp_path).run(12)


def test_a_data_loader_trains_like_its_data_set_and_a_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    with caplog.at_level(logging.WARNING):
        assert Trained().run(5, dataset=loader).losses == Trained().run(5).losses
    assert [record.message[:45] for record in caplog.records] == ["holdfast reads the DataLoader's data set dire"]


def test_non_finite_gradients_skip_the_step_but_it_counts() -> None:
    trained = Trained()
    trained.protect()
    before = [parameter.clone() for parameter in trained.model.parameters()]
    for step in trained.job.steps(1):
        for x, _ in step.micro_batches():
            step.backward(trained.model(x).sum() * float("inf"))
        assert step.apply()
        assert step.number == 1
    for old, new in zip(before, trained.model.parameters(), strict=True):
        assert old.equal(new)
    assert trained.schedule.last_epoch == 1


def skip_from_step_4(trained: Trained) -> None:
    """Train with non-finite gradients from the fourth step on."""
    for step in trained.job.steps(20):
        for x, _ in step.micro_batches():
            step.backward(trained.model(x).sum() * (float("nan") if step.number > 3 else 1.0))
        step.apply()


def test_ten_skipped_steps_in_a_row_end_the_job_and_save_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(tmp_path)
    trained.protect()

    with pytest.raises(JobFailedError, match=r"10 steps in a row were skipped .* the last good step is 3"):
        skip_from_step_4(trained)
    assert "step 4 was skipped" in caplog.text
    assert max(int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.name.startswith("step-")) == 3


def test_a_standalone_script_may_be_in_the_next_step_when_the_job_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation that ends the job may begin before the old one has reported; this must not kill the process."""
    trained = Trained(tmp_path)
    voting, on_order = WorkerMachine.begin_vote, Session._on_order
    in_next_step = threading.Event()

    def hear_late(session: Session, order: msg.Order) -> None:
        if isinstance(order, msg.Stop):
            assert in_next_step.wait(60.0)
        on_order(session, order)

    def vote_first(machine: WorkerMachine) -> bool:
        votes = voting(machine)
        if machine.step == 14:
            in_next_step.set()
            session = trained.job._session
            assert session is not None
            link = cast(SoloLink, session._link)
            assert session._changed.wait_for(lambda: machine.frozen and link._orders.empty(), 60.0)
        return votes

    monkeypatch.setattr(Session, "_on_order", hear_late)
    monkeypatch.setattr(WorkerMachine, "begin_vote", vote_first)
    trained.protect()
    with pytest.raises(JobFailedError, match=r"10 steps in a row were skipped .* the last good step is 3"):
        skip_from_step_4(trained)
    assert max(int(path.name.split("-")[1]) for path in tmp_path.iterdir() if path.name.startswith("step-")) == 3


def test_a_standalone_checkpoint_sealed_late_does_not_supersede_a_newer_one(tmp_path: Path) -> None:
    """Two threads seal checkpoints, so that the one of step 8 may count before the one of step 4."""
    link = SoloLink(LocalStorage(tmp_path), in_time=False)
    pruned: list[str] = []
    for step in (8, 4, 12):
        name = checkpoint_name(step)
        link.send(msg.CheckpointKept(worker="n/0/a", term=1, generation=1, step=step, name=name, bytes=1, seconds=0.1))
        while not link._orders.empty():
            order = link._orders.get()
            pruned += order.names if isinstance(order, msg.PruneCheckpoints) else ()
    assert pruned == [checkpoint_name(4)]


def test_a_standalone_link_handles_messages_of_two_threads_sequentially(tmp_path: Path) -> None:
    """Two threads write checkpoints; a race between their messages would leave a sealed checkpoint forever."""
    both = threading.Barrier(2)
    together: list[float] = []

    def now() -> float:
        if threading.current_thread() is not threading.main_thread():
            with contextlib.suppress(threading.BrokenBarrierError):
                together.append(both.wait(0.3))
        return 0.0

    link = SoloLink(LocalStorage(tmp_path), now=now)
    messages = [
        msg.CheckpointKept(
            worker="n/0/a", term=1, generation=1, step=step, name=checkpoint_name(step), bytes=1, seconds=0.1
        )
        for step in (4, 8)
    ]
    threads = [threading.Thread(target=link.send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == []


def checkpoint_name(step: int) -> str:
    return CheckpointName(term=1, generation=1, step=step, nonce="ab").folder


def test_a_script_that_skips_all_micro_batches_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A message about NaN would be wrong, because the script skipped the micro-batches itself."""
    trained = Trained(tmp_path)
    trained.protect()
    for step in trained.job.steps(1):
        for _ in step.micro_batches():
            step.skip("bad")
        step.apply()
    assert "step 1 was skipped: the script has skipped all of its micro-batches" in caplog.text


def test_the_state_of_a_loop_left_by_break_is_saved(tmp_path: Path) -> None:
    first = Trained(tmp_path)
    first.protect()
    for step in first.job.steps(9):
        for x, y in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(first.model(x), y))
        step.apply()
        if step.number == 3:
            break
    first.close()
    assert sorted(Trained(tmp_path).run(5).losses) == [4, 5]


def test_a_loop_that_fails_while_its_state_changes_saves_nothing(tmp_path: Path) -> None:
    first = Trained(tmp_path)
    first.protect()
    first.optimizer.register_step_post_hook(lambda *_: 1 / 0)  # type: ignore[arg-type]

    def train() -> None:
        for step in first.job.steps(9):
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.mse_loss(first.model(x), y))
            step.apply()

    with pytest.raises(ZeroDivisionError):
        train()
    first.close()
    assert not list(tmp_path.iterdir())


def test_wrong_uses_of_a_step_are_refused() -> None:
    trained = Trained()
    trained.protect()
    for step in trained.job.steps(1):
        with pytest.raises(HoldfastError, match="belongs inside"):
            step.backward(torch.zeros(()))
        with pytest.raises(HoldfastError, match="used up"):
            step.apply()
        break
    trained = Trained()
    trained.protect()
    for step in trained.job.steps(1):
        with pytest.raises(HoldfastError, match=r"had no step\.backward"):
            for _ in step.micro_batches():
                pass
        break


class Largest(torch.nn.Module):
    """Has its own buffer that follows the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return x


def test_a_buffer_updated_from_batches_in_an_unknown_way_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Largest(), torch.nn.Linear(4, 1))
    with pytest.raises(BadInputError, match=r"buffer '1\.largest', in an unknown way .* after_apply"):
        Trained(model=model).run(1)


def test_running_statistics_match_plain_pytorch_and_are_resumed(tmp_path: Path) -> None:
    def norm() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    whole = Trained(model=norm()).run(4)
    Trained(tmp_path, model=norm()).run(2)
    resumed = Trained(tmp_path, model=norm()).run(4)
    assert sorted(resumed.losses) == [3, 4]
    assert whole.job._session is not None
    order, plain = whole.job._session.workload.loader.order, torch.nn.BatchNorm1d(4)
    for number in range(12):
        plain(X[order.indices(1 + number // 3, number % 3)])
    for name, expected in plain.named_buffers():
        found = dict(whole.model.named_buffers())[f"0.{name}"]
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(found, dict(resumed.model.named_buffers())[f"0.{name}"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_batch": 7, "micro_batch": 2}, "multiple of the micro-batch"),
        ({"global_batch": 6.0}, "global_batch is 6.0: it must be a whole number"),
        ({"seed": "x"}, "seed is 'x': it must be a whole number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"dataset": iter([1])}, "neither indices nor shards"),
        ({"extra": [3]}, "extra is a list: give things by name"),
        ({"after_apply": "later"}, "after_apply is a str: give a function of the step"),
    ],
)
def test_bad_input_is_reported_in_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        Trained().protect(**options)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_order_of_calls_is_checked() -> None:
    trained = Trained()
    with pytest.raises(BadInputError, match="before job"):
        next(trained.job.steps(1))
    trained.run(1)
    with pytest.raises(BadInputError, match="twice"):
        trained.protect()
    with pytest.raises(BadInputError, match="used up"):
        next(trained.job.steps(1))


def test_a_checkpoint_directory_unknown_to_the_job_is_refused(tmp_path: Path) -> None:
    """The coordinator looks for checkpoints before the script runs, so it would neither prune nor resume these."""

    def settings(folder: str) -> WorkerSettings:
        spec = JobSpec(script="train.py", checkpoint=CheckpointSpec(dir=folder))
        return WorkerSettings(spec=spec, socket="/nowhere", worker="n0/0/a")

    with pytest.raises(BadInputError, match=r"checkpoint_dir='out'\) .* start it with --checkpoint-dir out$"):
        Job(settings(""), checkpoint_dir="out")
    assert Job(settings(str(tmp_path)), checkpoint_dir="out")._checkpoint_dir == str(tmp_path)


def test_no_thread_is_left_after_a_job_ends(tmp_path: Path) -> None:
    before = threading.enumerate()
    Trained(tmp_path).run(5)
    others = [thread for thread in threading.enumerate() if thread not in before and thread.name != "holdfast-solo"]
    ours = [thread for thread in others if thread.name.startswith("holdfast-")]
    for thread in ours:
        thread.join(30.0)  # A thread that has finished its work may still be exiting.
    assert [thread.name for thread in ours if thread.is_alive()] == []


def test_importing_holdfast_does_not_import_torch() -> None:
    # The package can be imported without torch; only training needs it.
    code = "import sys; sys.modules['torch'] = None; import holdfast; print('imported', flush=True); holdfast.init"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "imported\n")
    assert "import of torch halted" in done.stderr
    with pytest.raises(AttributeError):
        holdfast.nothing  # noqa: B018


class Count:
    """User state: a counter."""

    def __init__(self) -> None:
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, value: dict[str, Any]) -> None:
        self.count.copy_(value["count"])


class Counting:
    """A job with user state, which `after_apply` or the loop counts up once per step."""

    def __init__(
        self,
        directory: Path | str = "",
        *,
        inside: bool = True,
        raises_at: int = 0,
        error: BaseException | None = None,
        batch: int = 8,
    ) -> None:
        self.error = error or ZeroDivisionError("of the script")
        torch.manual_seed(0)
        self.model, self.count = torch.nn.Linear(4, 1), Count()
        self.seen: list[tuple[int, bool, float]] = []
        self.inside, self.raises_at = inside, raises_at
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.job = holdfast.init(checkpoint_dir=str(directory), checkpoint_every=4)
        after = self.after if inside else None
        extra = {"count": self.count}
        data = (self.model, self.optimizer, DATA)
        self.job.protect(*data, global_batch=batch, micro_batch=4, extra=extra, after_apply=after)

    def after(self, step: Step) -> None:
        if step.number == self.raises_at:
            raise self.error
        self.seen.append((step.number, step.applied, step.loss))
        self.count.count += 1

    def run(self, steps: int) -> int:
        for step in self.job.steps(steps):
            for x, y in step.micro_batches():
                step.backward(torch.nn.functional.mse_loss(self.model(x), y))
            assert step.apply()
            if not self.inside:
                self.count.count += 1
        return int(self.count.count)


def test_the_checkpoint_of_a_step_includes_changes_of_after_apply(tmp_path: Path) -> None:
    """Otherwise a resumed job would be a step behind."""
    first = Counting(tmp_path)
    assert first.run(9) == 9
    assert [number for number, applied, loss in first.seen if applied and loss == loss] == list(range(1, 10))
    assert Counting(tmp_path).run(12) == 12


@pytest.mark.parametrize("copies", [False, True])
def test_an_extra_changed_outside_of_apply_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, copies: bool
) -> None:
    if copies:
        monkeypatch.setattr(Count, "state_dict", lambda self: {"count": self.count.clone()})
    with pytest.raises(BadInputError, match=r"extra\['count'\] was changed outside of apply"):
        Counting(tmp_path, inside=False).run(3)
    # This is refused even for the last step, which no step follows.
    with pytest.raises(BadInputError, match=r"extra\['count'\] was changed outside of apply"):
        Counting(tmp_path, inside=False).run(1)


@pytest.mark.parametrize(
    "error", [error("of the script") for error in (ZeroDivisionError, SystemExit, KeyboardInterrupt)]
)
def test_the_step_is_saved_if_after_apply_raises(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error), match="of the script"):
        Counting(tmp_path, raises_at=3, error=error).run(6)
    assert [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))] == [3]
    again = Counting(tmp_path)
    again.run(3)
    whole = Counting()
    whole.run(3)
    assert torch.equal(again.model.weight, whole.model.weight)


class SetClock(SystemClock):
    """A clock that shows the time it was set to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_nested_pauses_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested pauses count once, or a step with pauses of half its time would seem to consist only of pauses."""
    clock = SetClock()
    monkeypatch.setattr("holdfast.runtime.session.job.SystemClock", lambda: clock)
    trained = Trained()
    trained.protect()
    with contextlib.suppress(ZeroDivisionError), trained.job.pause("evaluation"):
        clock.now += 1
        with trained.job.pause("its data"):
            clock.now += 2
        clock.now += 4
        raise ZeroDivisionError
    with trained.job.pause("evaluation"):
        clock.now += 8
    assert trained.job._session is not None
    assert trained.job._session._applier.paused_s == 15


def test_collectives_within_a_pause_do_not_count_as_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's collectives are not part of the script's pause, and later time in the pause is not work."""
    clock = SetClock()
    monkeypatch.setattr("holdfast.runtime.session.job.SystemClock", lambda: clock)
    trained = Trained()
    trained.protect()
    session = trained.job._session
    assert session is not None
    pauses: list[float] = []
    about: list[str] = []
    monkeypatch.setattr(NoProgress, "start_activity", lambda _, activity, micro_batch=-1: about.append(str(activity)))
    monkeypatch.setattr(NoProgress, "start_pause", lambda _, reason: about.append(reason))
    apply = session._machine.finish_apply

    def finish_apply(state_hash: str, paused_s: float, *, last_step: int) -> list[WorkerInstruction]:
        assert last_step == 1
        pauses.append(paused_s)
        clock.now += 16  # This is the wait for other workers.
        return apply(state_hash, paused_s, last_step=last_step)

    monkeypatch.setattr(session._machine, "finish_apply", finish_apply)
    for step in trained.job.steps(1):
        for inputs, targets in step.micro_batches():
            step.backward(torch.nn.functional.mse_loss(trained.model(inputs), targets))
        with trained.job.pause("its way"):
            clock.now += 1
            del about[:]
            step.apply()
            assert about[0] == "reducing"
            assert about[-1] == "its way"
            clock.now += 2
        assert session._applier.paused_s == 2
    assert pauses == [1]


def test_changed_sampling_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    Counting(tmp_path).run(2)
    with pytest.raises(BadInputError, match="global_batch was 8 and is 16"):
        Counting(tmp_path, batch=16).run(3)


def test_a_checkpoint_without_sampling_settings_is_accepted(tmp_path: Path) -> None:
    Counting(tmp_path).run(2)
    (checkpoint,) = tmp_path.iterdir()
    (checkpoint / SAMPLES).unlink()
    reseal(checkpoint)
    assert Counting(tmp_path).run(3) == 3


def test_a_changed_learning_rate_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Counting(tmp_path).run(2)
    again = Counting(tmp_path)
    again.optimizer.param_groups[0]["lr"] = 0.5
    with caplog.at_level(logging.WARNING):
        again.run(3)
    (logged,) = [record.getMessage() for record in caplog.records if "learning rate" in record.message]
    assert "0.01 is used, not the script's 0.5" in logged


def test_a_standalone_script_with_a_layout_has_world_size_one() -> None:
    job = holdfast.init(layout=holdfast.Layout(shard=4, tensor=2))
    assert (job.world_size, job.rank, job._joined.replica_group) == (1, 0, None)
    assert [job.mesh[name].size() for name in ("shard", "tensor")] == [1, 1]
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sizes", [{"shard": 0}, {"tensor": -1}, {"shard": 2.0}, {"stages": True}, {"tensor": 1025}])
def test_layouts_with_invalid_sizes_are_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(BadInputError, match=f"Layout\\({next(iter(sizes))}=.*: give a whole number from 1 to 1024"):
        holdfast.Layout(**sizes)


def test_layouts_with_stages_are_refused() -> None:
    with pytest.raises(BadInputError, match="stages cannot be trained yet"):
        holdfast.init(layout=holdfast.Layout(stages=2))
