"""One attempt at one step: gradients, surplus rounds, the reduction, the vote."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import torch

from holdfast.coordination.generations.assignment import share_of
from holdfast.coordination.worker.tasks import Compute
from holdfast.protocol.commit import Commit, Wish
from holdfast.protocol.messages.progress import Activity
from holdfast.protocol.messages.worker import FlopTally
from holdfast.protocol.plan import Phase
from holdfast.runtime.checkpoints.saver import CheckpointSaver
from holdfast.runtime.faults.dying_group import FaultingCommunicator
from holdfast.runtime.faults.orders import Faults
from holdfast.runtime.generation.resources import Groups, SharedContext
from holdfast.runtime.gradients.workload import Workload
from holdfast.runtime.groups import commit as commit_operation
from holdfast.runtime.groups.communicator import HaltedError, PeerLostError

#: Applies a passed step, given its generation, number and result. Returns False if a Stop came first.
Apply = Callable[[int, int, Commit], bool]
#: Waits for experts that arrive in the background, in a generation. Returns False if a Stop came first.
AwaitExperts = Callable[[int], bool]


class Attempt:
    """One attempt at one step, in one generation. For the training thread."""

    def __init__(
        self,
        shared: SharedContext,
        workload: Workload,
        faults: Faults,
        apply: Apply,
        compute: Compute,
        generation: int,
        await_experts: AwaitExperts = lambda _: True,
        saver: CheckpointSaver | None = None,
    ) -> None:
        """Start the step, or continue from the micro-batches that are already summed, and start to prefetch the others.

        Args:
            compute: the step, this worker's micro-batches of it, and those already summed.
            saver: knows whether this worker's part of an earlier checkpoint is still being written.
        """
        self.step = compute.step
        #: the micro-batch that is being computed
        self.current_micro_batch: int | None = None
        #: whether all rounds of the step are done
        self.complete = False
        self._shared = shared
        self._workload = workload
        self._faults = faults
        self._apply = apply
        self._await_experts = await_experts
        self._saver = saver
        self._compute = compute
        self._generation = generation
        workload.start_step(compute.step, compute.summed)
        workload.flop.start_attempt(generation, compute.step, asked=self._is_counting_flop)
        #: the name of the optimizer that the step updates
        self.update = workload.update.name
        workload.loader.expect(self._iter_upcoming())

    @property
    def undone(self) -> bool:
        """Whether the results of this attempt are obsolete: the generation is over, or a token exchange failed."""
        with self._shared.changed:
            return self._exchange_failed or self._shared.is_over(self._generation)

    def micro_batches(self) -> Iterator[int]:
        """Yield the micro-batches to compute, each as it starts; then serve the experts for ranks that have more.

        Those already summed are left out. After each one, its count of operations is sent if asked, and its note is
        kept. Ends early, with `complete` False, if the generation ends or is frozen, or if an exchange of tokens fails.
        Injects due faults.
        """
        progress = self._shared.progress
        for micro_batch in self._compute.micro_batches:
            if micro_batch in self._compute.summed:
                continue
            self._faults.strike_at("compute", self.step)
            if not self._shared.cross(self._generation, lambda machine, m=micro_batch: machine.begin_micro_batch(m)):
                return
            if not self._agree_on_micro_batch(micro_batch):
                return
            # From here on the coordinator may count on this micro-batch, so it is finished in any case.
            progress.start_activity(Activity.COMPUTE, micro_batch)
            self.current_micro_batch, began = micro_batch, time.monotonic()
            self._faults.strike_in_compute(self.step)
            yield micro_batch
            self._faults.slow_down(began)
            self.current_micro_batch = None
            self._send_flop(self._workload.samples.micro_batch)
            self._workload.keep_note(micro_batch)
            if self._exchange_failed:
                return
        progress.start_activity(Activity.SCRIPT)
        self.complete = self._serve_surplus_rounds()

    def _agree_on_micro_batch(self, micro_batch: int) -> bool:
        """Wait until all ranks of the replica group are ready for a micro-batch, and tell the machine the result.

        Returns:
            True if all will compute it, or if this worker holds the whole model; False if none of them will.
        """
        shared, machine = self._shared, self._shared.machine
        with shared.changed:
            proposal = machine.proposal
        if proposal is None:  # this worker holds the whole model
            return True
        went = shared.agree(proposal, lambda: machine.is_proposal_wanted(micro_batch))
        with shared.changed:
            if went:
                machine.accept_proposal(micro_batch)
            else:
                machine.withdraw_proposal(micro_batch)
        return went

    @property
    def _is_counting_flop(self) -> bool:
        """Whether this worker must count the floating-point operations of a round in this generation."""
        with self._shared.changed:
            machine = self._shared.machine
            plan = machine.generations.plan_of(self._generation)
            return plan is not None and plan.is_counting(machine.worker)

    def _send_flop(self, samples: int) -> None:
        """Stop counting floating-point operations, and send the count, unless none was taken or an exchange failed.

        Args:
            samples: samples of this worker in the round; 0 if it only served its experts.
        """
        flop = self._workload.flop.stop_round()
        if flop is None or self._exchange_failed:
            return
        worker, generation = self._shared.machine.worker, self._generation
        tally = FlopTally(worker=worker, generation=generation, step=self.step, flop=float(flop), samples=samples)
        self._shared.send(tally)

    def _iter_upcoming(self) -> Iterator[tuple[int, int]]:
        """Yield, without end, the (step, micro-batch) pairs that this worker will load: the rest of this step, then all
        later ones.

        Later steps assume that the plan stays the same. They are left out, so that the pairs end, if this worker is not
        in the plan any longer or has no share of a step.
        """
        compute = self._compute
        yield from ((compute.step, one) for one in compute.micro_batches if one not in compute.summed)
        with self._shared.changed:
            machine = self._shared.machine
            plan = machine.generations.plan
            rank = plan.rank(machine.worker) if plan is not None else None  # Another plan may be in force by now.
        usual = share_of(plan, self._workload.micro_batches, rank) if plan is not None and rank is not None else ()
        for step in count(compute.step + 1) if usual else ():
            yield from ((step, one) for one in usual)

    def load(self, micro_batch: int) -> Any:
        """Fetch a micro-batch, seed the random generators for it, and start to count its operations if asked."""
        batch = self._workload.load_micro_batch(micro_batch)
        self._workload.flop.start_round()
        return batch

    def backward(self, loss: torch.Tensor, micro_batch: int) -> None:
        """See `Workload.backward`: add the gradients of a micro-batch to the sums of the step."""
        self._workload.backward(loss, micro_batch)

    def skip(self, reason: str, micro_batch: int) -> None:
        """Leave a micro-batch out, see `Workload.skip`; its floating-point operations are not counted."""
        self._workload.flop.stop_round()
        self._workload.skip(reason, micro_batch)

    def skip_reason(self, micro_batch: int) -> str:
        """Return why a micro-batch was skipped in an earlier attempt at the step, or "" if it was not."""
        return self._workload.skipping.find_decision(self.step, micro_batch)

    def log(self, values: Mapping[str, float | torch.Tensor], reduce: str) -> None:
        """Log values of the current micro-batch, or of this rank outside of the loop; `reduce`: see `Step.log`."""
        self._workload.logged.log(values, reduce)

    def check_extra(self) -> None:
        """Check that no `extra` was changed outside of `apply()`.

        Raises:
            BadInputError: one was changed.
        """
        self._workload.state.watch.check_unchanged()

    def commit(self) -> bool:
        """Reduce the gradients, vote with all workers, and apply the step if it passed.

        Returns:
            True if the step is applied. False if the coordinator decides about it: a Stop came, a peer was lost, or the
                result was refused.

        Raises:
            StepUseError, BadInputError: as `Workload.reduce`.
            Exception: an exception of the optimizer or of `after_apply`.
        """
        with self._shared.changed:
            resources = self._shared.resources.of(self._generation)
            groups = resources.groups if resources is not None else None
        if groups is None or not self._shared.cross(self._generation, lambda machine: machine.begin_reduction()):
            return False
        self._shared.progress.start_activity(Activity.REDUCING)
        try:
            v = self._reduce_and_vote(groups)
        except (HaltedError, PeerLostError) as error:
            self._shared.abandon_groups(groups, self._generation, error)
            return False
        if v is None:
            return False
        self._faults.strike_at("passed", self.step)
        return self._apply(self._generation, self.step, v)

    @property
    def _exchange_failed(self) -> bool:
        """Whether an exchange of tokens was interrupted, so that the results of this attempt are void."""
        experts = self._workload.experts
        return experts is not None and experts.void is not None

    def _serve_surplus_rounds(self) -> bool:
        """Compute this worker's experts for ranks that have more micro-batches than this one.

        Returns:
            True if the model has no experts or all rounds are done; False if the attempt became obsolete meanwhile.
        """
        experts, share = self._workload.experts, self._compute.micro_batches
        if experts is None:
            return True
        with self._shared.changed:
            plan = self._shared.machine.plan
        units = plan.units if plan is not None else 1
        for number in range(len(share), -(-self._workload.micro_batches // units)):
            if self.undone:
                return False
            self._shared.progress.start_activity(Activity.COMPUTE)
            self._workload.flop.start_round()
            experts.serve_micro_batch(self.step, number)
            self._send_flop(0)
            if self._exchange_failed:
                return False
        return True

    def _reduce_and_vote(self, groups: Groups) -> Commit | None:
        """Compare fingerprints and reduce gradients over the group, wait for arriving experts, and vote.

        Faults that are due, such as a slow link, are injected on the way.

        Returns:
            The step result; None if a Stop froze this worker before its vote, or the result was refused.

        Raises:
            HaltedError, PeerLostError: the reduction or the vote was interrupted.
            StepUseError, BadInputError: as `Workload.reduce`.
        """
        domain, all_workers = groups.domain, groups.world if groups.domain is not groups.world else None
        if self._faults.slow_link > 1.0:
            self._shared.link_rate.slow_down(domain.sockets, self._faults.slow_link)
        if self._faults.is_due("reducing", self.step):
            domain = FaultingCommunicator(domain, self._faults, self.step, "reducing")
        with self._shared.changed:
            compares_state = self._shared.machine.compares_state
        fingerprint = self._workload.fingerprint(self.step, with_state=compares_state)
        with self._shared.changed:
            self._shared.machine.set_fingerprint(fingerprint, self._workload.describe_settings)
        v = self._workload.reduce(domain, all_workers, fingerprint)
        rate = self._shared.link_rate.measure(groups.domain.sockets)
        if rate is not None:
            self._shared.progress.set_link_rate(rate)
        if not (self._await_experts(self._generation) and self._cross_ready(v)):
            return None
        self._faults.strike_at("ready", self.step)
        return self._vote(groups, v)

    def _cross_ready(self, v: Commit) -> bool:
        """Pass the reduced result to the machine after all local reductions.

        Returns:
            False if a Stop came first. Or if the machine refused the result, because a micro-batch is missing or
            counted twice, or because workers differ in settings or state.
        """
        machine = self._shared.machine
        with self._shared.changed:
            if self._shared.is_over(self._generation):
                return False
            self._shared.execute(machine.finish_reduction(v))
            return machine.phase is Phase.READY

    def _vote(self, groups: Groups, v: Commit) -> Commit | None:
        """Issue the commit operation with this worker's flags and wishes, and tell the machine how it ended.

        Args:
            v: the step result after the reduction, without flags.

        Returns:
            The step result with the flags of all workers, or None if a Stop came before the vote.

        Raises:
            HaltedError, PeerLostError: the operation was interrupted; the machine knows.
        """
        machine = self._shared.machine
        still_saving = self._saver is not None and self._saver.is_still_saving(self.step)
        saving = (Wish.STILL_SAVING,) if still_saving else ()
        with self._shared.changed:
            if self._shared.is_over(self._generation) or not machine.begin_vote():
                return None
            flags, wishes = machine.generations.flags, (*machine.wishes.raised, *saving)
        self._shared.progress.start_activity(Activity.VOTED)
        try:
            pending = commit_operation.start_commit(groups.world, flags, wishes)
            self._faults.strike_at("voted", self.step)
            v = commit_operation.finish_commit(pending, v)
        except (HaltedError, PeerLostError):
            with self._shared.changed:
                self._shared.execute(machine.abandon_vote())
            raise
        with self._shared.changed:
            self._shared.execute(machine.pass_vote(v))
        return v
