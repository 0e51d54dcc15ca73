"""Evaluates the state between two steps. Shards are divided among the ranks; a repetition keeps finished shards.

An evaluation runs at the beginning of an attempt at a step, when the state of the step before is in force on all ranks.
The ranks tell each other which shards they have. Missing shards are assigned, and all results are gathered. The state
does not change, so the coordinator does not decide anything: after a failure, a rank starts again under the next
generation with its finished shards.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.errors import BadInputError
from holdfast.protocol.layouts.proposals import Proposal, ProposalKind
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import MAX_TOLD, EvaluationDone, EvaluationResult
from holdfast.runtime.checkpoints.best import Rating
from holdfast.runtime.checkpoints.saver import CheckpointSaver, PartShare
from holdfast.runtime.data.loading import move_to_device
from holdfast.runtime.data.randomness import seed_micro_batch
from holdfast.runtime.evaluation.shards import (
    ModelEvaluation,
    ShardResult,
    find_first_holders,
    intersect_bits,
    pack_shards,
)
from holdfast.runtime.generation.experts import SessionExperts
from holdfast.runtime.generation.resources import Groups, SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.gathering import gather_bytes
from holdfast.runtime.tensors import fork_rng, named_modules

logger = logging.getLogger(__name__)

#: separates the randomness from that of the step's micro-batch with the same number
_EVALUATING = 0x6576616C
#: bits for the shard in the number of a proposal; the higher bits are the evaluation's
_SHARD_BITS = 40


class _Share(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution: its evaluation's settings, and which shards it has."""

    settings: tuple[str, int, int, int]
    bits: bytes


_shares = msgspec.msgpack.Decoder(_Share)
_results = msgspec.msgpack.Decoder(dict[int, ShardResult])
_encoder = msgspec.msgpack.Encoder()


class Evaluator:
    """All evaluations of a job. For the training thread."""

    def __init__(
        self, shared: SharedContext, workload: Workload, saver: CheckpointSaver | None, experts: SessionExperts | None
    ) -> None:
        """Create one without evaluations, from a session's parts."""
        self._shared = shared
        self._workload = workload
        self._saver = saver
        self._experts = experts
        self._evaluations: list[ModelEvaluation] = []
        #: the step that the results belong to; by evaluation and shard
        self._step = 0
        self._shard_results: dict[str, dict[int, ShardResult]] = {}
        #: combined results of the newest steps
        self._combined: list[EvaluationResult] = []

    def add(self, evaluation: ModelEvaluation) -> None:
        """Add an evaluation.

        Raises:
            BadInputError: its name is taken, or best states must be kept and there is no checkpoint directory.
        """
        if any(other.name == evaluation.name for other in self._evaluations):
            raise BadInputError(f"job.evaluate(name={evaluation.name!r}) was called twice: give them other names")
        if evaluation.choice.keep and self._saver is None:
            raise BadInputError(
                f"job.evaluate(name={evaluation.name!r}, save_top_k={evaluation.choice.keep}) needs a checkpoint "
                "directory: --checkpoint-dir, or holdfast.init(checkpoint_dir=...)"
            )
        self._evaluations.append(evaluation)

    def on_state_replaced(self) -> None:
        """Forget all results of shards and evaluations, which may belong to another state."""
        self._step, self._shard_results, self._combined = 0, {}, []

    def due_at(self, step: int) -> list[ModelEvaluation]:
        """Return the evaluations that are due after `step`; none at step 0."""
        return [evaluation for evaluation in self._evaluations if step > 0 and step % evaluation.every == 0]

    def run_due(self, step: int, generation: int) -> bool:
        """Run the due evaluations of the state of `step`, together with all ranks, and send the results.

        Even if nothing is due, the metrics of the previous evaluations are removed from the next step's metrics. Shards
        finished before a failure are kept while the step stays the same.

        Returns:
            True, also if none is due. False if the generation ended meanwhile; or, after the Stop, if a peer was lost,
            which is reported.

        Raises:
            BadInputError: a result is not valid.
            Exception: an exception of the script's function.
        """
        due = self.due_at(step)
        self._workload.logged.evaluation_metrics = {}
        if not due:
            return True
        with self._shared.changed:
            resources = self._shared.resources.of(generation)
            groups = resources.groups if resources is not None and not self._shared.is_over(generation) else None
        if groups is None:
            return False
        if self._step != step:
            self._step, self._shard_results = step, {}
        try:
            for evaluation in due:
                if not self._evaluate(evaluation, groups, generation):
                    return False
        except (HaltedError, PeerLostError) as error:
            self._shared.abandon_groups(groups, generation, error)
            self._shared.wait_for(generation, lambda: None)
            return False
        self._send_results(generation)
        return True

    def _evaluate(self, evaluation: ModelEvaluation, groups: Groups, generation: int) -> bool:
        """Run one evaluation: divide its missing shards among the ranks, gather all results, and record their means.

        Args:
            groups: of the generation; all ranks of both groups must call it.

        Returns:
            False if the generation ended meanwhile, or an exchange of tokens failed. Finished shards are kept.

        Raises:
            HaltedError, PeerLostError: an exchange of shards was abandoned or failed.
        """
        comm, held = groups.domain, self._shard_results.setdefault(evaluation.name, {})
        self._shared.progress.start_activity(Activity.EVALUATING)
        holders = self._find_holders(evaluation, groups.world, held)
        missing = [shard for shard, holder in enumerate(holders) if holder is None]
        with _preserve_script_state(self._workload), torch.no_grad():
            for first in range(0, len(missing), comm.size):
                with self._shared.changed:
                    if self._shared.is_over(generation):
                        return False
                if not self._run_round(evaluation, held, missing[first : first + comm.size], comm.rank, generation):
                    self._shared.wait_for(generation, lambda: None)  # the layers reported the failure
                    return False
        results = {shard: held[shard] for shard in missing[comm.rank :: comm.size]}
        results |= {shard: held[shard] for shard, holder in enumerate(holders) if holder == comm.rank}
        self._shared.progress.start_activity(Activity.EVALUATING)
        # Results of a replica group's ranks may differ by rounding, if experts were summed elsewhere. Use the first
        # rank's.
        results = {} if self._workload.position.local_rank else results
        for share in gather_bytes(groups.world, _encoder.encode(results), "evaluation"):
            held.update(_results.decode(share))
        found = evaluation.combine([held[shard] for shard in range(evaluation.shards)])
        self._record_result(evaluation, found, groups.world.rank)
        return True

    def _run_round(
        self,
        evaluation: ModelEvaluation,
        held: dict[int, ShardResult],
        shards: Sequence[int],
        rank: int,
        generation: int,
    ) -> bool:
        """Measure this rank's shard of a round, and add its result to `held`.

        Experts do not move. A rank without a shard lets its experts take part in the shards of other ranks.

        Args:
            shards: of the round, by rank; maybe fewer than ranks.

        Returns:
            False if an exchange of tokens was interrupted, or a Stop came; then the result is not added.

        Raises:
            BadInputError: the model has experts, and the function does not call it once for each batch.
        """
        experts = self._workload.experts
        if rank < len(shards):
            shard = shards[rank]
            if not self._agree_on_shard(evaluation, generation, shard):
                return False
            self._shared.progress.start_activity(Activity.EVALUATING, shard)
            result = self._measure_shard(evaluation, shard)
            if experts is not None and not experts.has_evaluated_shard():
                raise BadInputError(
                    f"the function of job.evaluate(name={evaluation.name!r}) does not call the model once for each "
                    "batch: the MoE layers of all workers are called together, each of them once"
                )
            if experts is None or experts.void is None:
                held[shard] = result
        elif experts is not None:
            self._shared.progress.start_activity(Activity.EVALUATING)
            experts.serve_evaluation_shard(self._step, shards[0])
        return experts is None or experts.void is None

    def _agree_on_shard(self, evaluation: ModelEvaluation, generation: int, shard: int) -> bool:
        """Wait until all ranks of the replica group are ready to measure a shard, and return True. Return False if the
        generation ended first: then no rank measures it.
        """
        number = self._evaluations.index(evaluation) << _SHARD_BITS | shard
        proposal = Proposal(generation, self._step, number, ProposalKind.EVALUATION)
        return self._shared.agree(proposal, lambda: not self._shared.is_over(generation))

    def _find_holders(
        self, evaluation: ModelEvaluation, comm: Communicator, held: dict[int, ShardResult]
    ) -> list[int | None]:
        """Exchange with all ranks which shards they have. Return the first rank that has each shard, or None.

        A replica group has a shard if all its ranks do. The returned ranks are those of the domain.

        Args:
            comm: of the world, because only some ranks of a replica group may have received results.
            held: the results that this rank has, by shard.

        Raises:
            BadInputError: the workers have different evaluations.
            HaltedError, PeerLostError: the exchange was abandoned or failed.
        """
        mine = _Share(evaluation.settings, pack_shards(held, evaluation.shards))
        shares = [_shares.decode(share) for share in gather_bytes(comm, _encoder.encode(mine), "evaluation")]
        if others := sorted({share.settings for share in shares} - {evaluation.settings}):
            raise BadInputError(
                f"job.evaluate() has other arguments on other workers: (name, every, samples, batch) is "
                f"{evaluation.settings} here and {others[0]} elsewhere"
            )
        places = self._workload.position.layout.places
        units = [shares[first : first + places] for first in range(0, len(shares), places)]
        return find_first_holders([intersect_bits([share.bits for share in unit]) for unit in units], evaluation.shards)

    def _measure_shard(self, evaluation: ModelEvaluation, shard: int) -> ShardResult:
        """Return the script's result for a shard, with its number of samples.

        Seeds the random generators by step and shard, fetches the batch to the device, and prepares the experts for it.
        """
        workload = self._workload
        seed_micro_batch(workload.seed ^ _EVALUATING, self._step, shard)
        batch = move_to_device(evaluation.fetch(self._step, shard), workload.loader.device)
        if workload.experts is not None:
            workload.experts.start_evaluation_shard(self._step, shard)
        return evaluation.make_result(shard, evaluation.measure(batch))

    def _record_result(self, evaluation: ModelEvaluation, found: dict[str, float], rank: int) -> None:
        """Add the means to the next step's metrics and to the results to send. If best states are kept and the
        monitored value is finite, save this worker's part of the state.

        Rank 0 also logs the means, rates the saved state, and warns if the monitored value is not finite. The result of
        a repeated evaluation is listed and logged only once.

        Args:
            found: the means by name.
        """
        step, name = self._step, evaluation.name
        self._workload.logged.evaluation_metrics |= {f"{name}/{key}": value for key, value in found.items()}
        best = self._may_be_best(evaluation, found)
        if best:
            self._save_state()
        if best and rank == 0 and self._saver is not None:
            choice = evaluation.choice
            rating = Rating(evaluation=name, step=step, monitor=choice.monitor, value=found[choice.monitor])
            self._saver.rate_state(rating, choice)
        if any((one.name, one.step) == (name, step) for one in self._combined):
            return
        result = EvaluationResult(name=name, step=step, samples=evaluation.samples, metrics=found)
        self._combined = [*self._combined, result][-MAX_TOLD:]
        if rank == 0:
            values = ", ".join(f"{key} {value:g}" for key, value in found.items())
            logger.info("%s of step %d: %s", name, step, values)
            if evaluation.choice.keep and not best:
                monitor = evaluation.choice.monitor
                logger.warning(
                    "%s of step %d: %s is %s, so its state is not kept as one of the best",
                    *(name, step, monitor, found[monitor]),
                )

    @staticmethod
    def _may_be_best(evaluation: ModelEvaluation, found: dict[str, float]) -> bool:
        """Return whether best states are kept, and this result can be compared."""
        return bool(evaluation.choice.keep) and math.isfinite(found[evaluation.choice.monitor])

    def _save_state(self) -> None:
        """Save this worker's part of the evaluated state, unless it is saved or there is no checkpoint directory."""
        saver, plan, step = self._saver, self._shared.machine.plan, self._step
        if saver is None or plan is None:
            return
        share = PartShare.of_member(plan, self._shared.machine.worker)
        if not saver.has_saved(step, share):
            self._shared.progress.start_activity(Activity.SAVING)
            saver.save(
                self._workload.state, step, share, self._experts.rows_to_save if self._experts is not None else None
            )

    def _send_results(self, generation: int) -> None:
        """Send the newest results of all evaluations, if this worker is one that reports steps.

        Earlier results are sent again, because the coordinator may have changed.
        """
        with self._shared.changed:
            machine = self._shared.machine
            done = EvaluationDone(worker=machine.worker, generation=generation, results=tuple(self._combined))
            if machine.plan is not None and machine.plan.is_witness(machine.worker):
                self._shared.send(done)


@contextmanager
def _preserve_script_state(workload: Workload) -> Generator[None]:
    """Restore all random generators, the training modes of modules, and running statistics after the block.

    Parameters that FSDP2 has gathered are dropped before and after it.
    """
    modules: Sequence[tuple[torch.nn.Module, bool]] = [
        (module, module.training) for _, module in named_modules(workload.state.model)
    ]
    python, array = random.getstate(), np.random.get_state()
    untyped: Any = np.random
    workload.reshard_parameters()
    try:
        with fork_rng(), workload.preserve_statistics():
            yield
    finally:
        random.setstate(python)
        untyped.set_state(array)
        for module, training in modules:
            module.training = training
        workload.reshard_parameters()
