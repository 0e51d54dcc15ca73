"""A worker's findings about a state are dropped when another state replaces it."""

from __future__ import annotations

from typing import Any

from thread_rank import DATA, MICRO_BATCH, Rank
from thread_world import run_threads

from holdfast.runtime.checkpoints.best import BestChoice
from holdfast.runtime.evaluation.evaluating import Evaluator
from holdfast.runtime.evaluation.shards import ModelEvaluation
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.groups.communicator import Communicator
from holdfast.runtime.session.applying import StepApplier


def test_evaluations_are_repeated_after_the_state_is_replaced() -> None:
    """Otherwise the best checkpoint would be chosen by the result of another state of this step."""

    def body(comm: Communicator) -> None:
        rank, measured = Rank(comm), list[int]()

        def measure(batch: Any) -> dict[str, float]:
            measured.append(len(batch))
            return {"loss": float(len(measured))}

        evaluating = Evaluator(rank.shared, rank.workload, None, None)
        choice = BestChoice(monitor="loss", mode="min", keep=0)
        evaluating.add(ModelEvaluation(measure, DATA, every=1, name="eval", micro_batch=MICRO_BATCH, choice=choice))
        applying = StepApplier(
            rank.shared,
            rank.workload,
            Faults(lambda: None),
            experts=None,
            saver=None,
            snapshots=None,
            after_apply=None,
            on_after_apply_error=lambda *_: None,
            verify_state=0,
            evaluator=evaluating,
        )
        shards = len(DATA) // MICRO_BATCH
        for seen in (shards, shards):  # The second run reuses the known result.
            assert evaluating.run_due(1, 1)
            assert len(measured) == seen
        applying.on_state_replaced()
        assert evaluating.run_due(1, 1)
        assert len(measured) == 2 * shards
        assert applying.last_applied is None

    run_threads(["a"], body, seed=1, flat_up_to=8, fan_out=3)
