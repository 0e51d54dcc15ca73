"""`job.evaluate` in a world of one: its schedule, its isolation from training, and its refusals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from holdfast import MoE
from holdfast.errors import BadInputError
from holdfast.protocol.checkpoints import directory as checkpoint_dir
from holdfast.runtime.session.job import Job
from holdfast.runtime.session.step import Step
from holdfast.storage import LocalStorage

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


class Script:
    """A small job and its record."""

    def __init__(self, directory: Path | str = "", *, every: int = 100) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.job = Job(None, checkpoint_dir=str(directory), checkpoint_every=every)
        self.job.protect(self.model, self.optimizer, DATA, global_batch=4, micro_batch=2, after_apply=self.follow)
        self.metrics: dict[int, dict[str, float]] = {}
        self.followed: dict[int, float] = {}
        self.losses: list[float] = []
        self.shards = self.steps = 0
        self.after: Callable[[Step], object] = lambda step: None

    def follow(self, step: Step) -> None:
        if "eval/loss" in step.metrics:
            self.followed[step.number] = step.metrics["eval/loss"]

    def measure(self, batch: Any) -> dict[str, torch.Tensor | float]:
        x, y = batch
        self.shards += 1
        self.model.eval()
        return {"loss": mse_loss(self.model(x), y), "rows": len(x)}

    def run(self, steps: int) -> Script:
        for step in self.job.steps(steps):
            for x, y in step.micro_batches():
                step.backward(mse_loss(self.model(x), y))
            step.log({"seen": step.number})
            assert step.apply()
            self.losses.append(step.loss)
            self.steps = step.number
            self.after(step)
            self.metrics[step.number] = dict(step.metrics)
        return self


def test_the_next_step_has_the_evaluation_results() -> None:
    script = Script()
    script.job.evaluate(script.measure, DATA, every=2)
    script.run(4)
    assert script.shards == 2 * 10, "after step 2, and after the last one"
    assert list(script.metrics[3]) == ["eval/loss", "eval/rows", "seen"]
    assert script.metrics[3]["eval/rows"] == 2
    assert {number: list(found) for number, found in script.metrics.items() if number != 3} == {
        number: ["seen"] for number in (1, 2, 4)
    }
    assert script.followed == {3: script.metrics[3]["eval/loss"]}


def test_the_last_state_is_evaluated_after_a_stop_but_not_after_a_break() -> None:
    script = Script()
    script.job.evaluate(script.measure, DATA, every=2)
    script.after = lambda step: script.job.stop("good enough") if step.number == 3 else None
    script.run(9)
    assert sorted(script.metrics) == [1, 2, 3, 4], "the next step is the last"
    assert script.shards == 2 * 10
    left = Script()
    left.job.evaluate(left.measure, DATA, every=1)
    for step in left.job.steps(9):
        for x, y in step.micro_batches():
            step.backward(mse_loss(left.model(x), y))
        assert step.apply()
        if step.number == 2:
            break
    assert left.shards == 10


def test_an_evaluation_does_not_change_training() -> None:
    """Modes, generators and statistics stay, although the evaluation calls train(), draws, and has no gradients."""
    seen: list[Any] = []

    def disturb(batch: Any) -> dict[str, float]:
        assert not torch.is_grad_enabled()
        script.model.train()
        script.model(batch[0] * 100)
        script.model.eval()
        seen.append((torch.rand(()).item(), random.random(), np.random.rand()))
        return {"loss": 0.0}

    plain = Script().run(4)
    left = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    script = Script()
    script.job.evaluate(disturb, DATA, every=1)
    script.run(4)
    assert script.model.training
    assert script.losses == plain.losses
    for name, buffer in plain.model.named_buffers():
        assert torch.equal(dict(script.model.named_buffers())[name], buffer)
    assert len(set(seen)) == len(seen), "every shard of every step must have its own randomness"
    assert left == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    again = Script()
    again.job.evaluate(disturb, DATA, every=1)
    first, script = list(seen), again
    seen.clear()
    again.run(4)
    assert seen == first


def best_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("best-*.json"))


def await_best(folder: Path, steps: list[int]) -> None:
    deadline = time.monotonic() + 60.0
    while best_in(folder) != [f"best-valid-{step:08d}" for step in steps]:
        assert time.monotonic() < deadline, best_in(folder)
        time.sleep(0.01)


def test_the_best_states_are_kept(tmp_path: Path) -> None:
    losses = iter((3.0, 1.0, 2.0, 5.0))
    script = Script(tmp_path)
    script.job.evaluate(lambda batch: {"loss": found[0]}, DATA, every=2, name="valid", save_top_k=2)
    found = [0.0]
    kept_after = {3: [2], 5: [2, 4], 7: [4, 6]}
    for step in script.job.steps(8):
        for x, y in step.micro_batches():
            step.backward(mse_loss(script.model(x), y))
        assert step.apply()
        if step.number % 2 == 0:
            found[0] = next(losses)
        # A step takes a millisecond: the next save would overtake this one, and this step's state would be left out.
        if step.number in kept_after:
            await_best(tmp_path, kept_after[step.number])
    kept = sorted(path.name for path in tmp_path.glob("best-*") if path.is_dir())
    assert kept == best_in(tmp_path) == ["best-valid-00000004", "best-valid-00000006"]
    assert [checkpoint_dir.verify(LocalStorage(tmp_path), name) for name in kept] == [4, 6]
    record = json.loads((tmp_path / "best-valid-00000004.json").read_text())
    assert record == {"evaluation": "valid", "step": 4, "monitor": "loss", "value": 1.0}


def test_a_state_with_a_non_finite_value_is_not_kept_as_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """There is room, but the first kept state would be shown as the best."""
    values = {2: float("nan"), 4: float("-inf"), 6: 3.0}
    script = Script(tmp_path)
    script.job.evaluate(lambda batch: {"loss": values[script.steps]}, DATA, every=2, save_top_k=2)
    script.run(6)
    assert [path.name for path in tmp_path.glob("best-*") if path.is_dir()] == ["best-eval-00000006"]
    logged = [record.getMessage() for record in caplog.records if "not kept as one of the best" in record.getMessage()]
    assert logged == [
        f"eval of step {step}: loss is {value}, so its state is not kept as one of the best"
        for step, value in ((2, "nan"), (4, "-inf"))
    ]


def test_an_exception_in_an_evaluation_ends_the_script() -> None:
    def fails(batch: Any) -> dict[str, float]:
        raise LookupError("no such word")

    script = Script()
    script.job.evaluate(fails, DATA, every=1)
    with pytest.raises(LookupError, match="no such word"):
        script.run(2)
    assert sorted(script.metrics) == [1]


def test_a_started_checkpoint_is_completed_although_the_evaluation_raises(tmp_path: Path) -> None:
    """The step's state is valid, so a resumed job evaluates it again."""
    script = Script(tmp_path, every=1)
    script.job.evaluate(lambda batch: 1 / 0, DATA, every=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ZeroDivisionError):
        script.run(2)
    script.job.await_saved()
    assert [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))] == [1]


def test_wrong_uses_of_evaluate_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"call job.protect\(...\) before job.evaluate"):
        Job(None).evaluate(lambda batch: {}, DATA, every=1)
    script = Script()
    script.job.evaluate(script.measure, DATA, every=1)
    with pytest.raises(BadInputError, match=r"evaluate\(name='eval'\) was called twice"):
        script.job.evaluate(script.measure, DATA, every=2)
    with pytest.raises(BadInputError, match=r"save_top_k=1.* needs a checkpoint directory"):
        script.job.evaluate(script.measure, DATA, every=2, name="best", save_top_k=1)
    for step in script.job.steps(2):
        for x, y in step.micro_batches():
            step.backward(mse_loss(script.model(x), y))
        if step.number == 2:
            step.log({"eval/loss": 1.0})
            with pytest.raises(BadInputError, match=r"'eval/loss' is a value of job.evaluate"):
                step.apply()
            break
        assert step.apply()


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_a_model_with_experts_is_evaluated_and_saved_after_a_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    write = LocalStorage.write

    def slow_at_step_2(storage: LocalStorage, path: str, chunks: Any) -> None:
        time.sleep(pause_s if path.startswith("step-00000002") else 0.0)
        write(storage, path, chunks)

    monkeypatch.setattr(LocalStorage, "write", slow_at_step_2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(MoE(4, 8, 2, top_k=1), torch.nn.Linear(4, 1))
    job = Job(None, checkpoint_dir=tmp_path, checkpoint_every=100)
    job.protect(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, global_batch=4, micro_batch=2)
    job.evaluate(lambda batch: {"loss": mse_loss(model(batch[0]), batch[1])}, DATA, every=2, save_top_k=1)
    for step in job.steps(9):
        if step.number == 3:
            with torch.no_grad():
                expected = mse_loss(model(X), DATA.tensors[1]).item()
        for x, y in step.micro_batches():
            step.backward(mse_loss(model(x), y))
        assert step.apply()
        if step.number == 3:
            assert step.metrics["eval/loss"] == pytest.approx(expected, rel=1e-6)
            break
    job.await_saved()
    assert [name.step for name in checkpoint_dir.find_checkpoints(LocalStorage(tmp_path))] == [2, 3]
    assert [path.name for path in tmp_path.glob("best-*") if path.is_dir()] == ["best-eval-00000002"]
