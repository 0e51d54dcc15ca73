"""Reports how fast a job trains, and what failures cost it, for the pool's plan.

It reports a value once it is known, and again once it differs by a tenth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import asdict

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.layouts.choosing import layouts_by_nodes
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.transaction import Transaction
from holdfast.protocol.layouts.layout_list import Layouts
from holdfast.protocol.pool.sharing import JobCosts, JobPace

#: seconds between updates: every tick asks each of a pool's many jobs
_EVERY_S = 2.0
#: Relative difference from which a value is reported again. The pool writes each report to its record.
_OFF_BY = 0.1
#: largest number of nodes for which layouts are reported
_MOST_NODES = 1024


class PaceReporter:
    """Remembers the reported values, and updates them when they differ enough."""

    def __init__(
        self,
        transaction: Transaction,
        config: CoordinatorConfig,
        costs: MeasuredCosts,
        saves_every_s: Callable[[], float | None],
    ) -> None:
        self._transaction = transaction
        self._spec = config.spec
        self._costs = costs
        self._reported: JobPace | None = None
        self._reported_costs = JobCosts()
        self._saves_every_s = saves_every_s
        self._next_update_at = 0.0

    @property
    def pace(self) -> JobPace | None:
        """The pace to report, or None before a step was measured. Updated at most every `_EVERY_S` seconds."""
        transaction = self._transaction
        if transaction.now >= self._next_update_at:
            self._next_update_at = transaction.now + _EVERY_S
            self._update_pace()
        return self._reported

    @property
    def costs(self) -> JobCosts:
        """The costs of failures to report; the same object while they are about the same."""
        return self._reported_costs

    def _update_costs(self) -> None:
        """Update the reported costs of failures and the saving period if one differs by a tenth."""
        found = {
            cost.value: self._costs.of(cost)
            for cost in (Cost.HIT, Cost.REPLACED, Cost.ROLLED_BACK)
            if self._costs.is_measured(cost)
        }
        found["saves_every_s"] = self._saves_every_s() or 0.0
        reported = asdict(self._reported_costs)
        if any(abs(seconds - reported[name]) > _OFF_BY * seconds for name, seconds in found.items()):
            self._reported_costs = JobCosts(**found)

    def _update_pace(self) -> None:
        """Update the reported costs; also the pace, if a step time differs by a tenth, or the FLOP or the layouts have
        changed.

        Step times of another layout are dropped, and so are numbers of workers that do not fill whole nodes.
        """
        self._update_costs()
        workers = self._spec.workers_per_node
        record = self._transaction.record
        layouts = layouts_by_nodes(record, nodes=min(self._spec.max_nodes, _MOST_NODES), workers=workers)
        step_s = dict(self._reported.step_s) if self._reported is not None and self._reported.layouts == layouts else {}
        for world, seconds in self._costs.paces().items():
            nodes, more = divmod(world, workers)
            if not more and abs(seconds - step_s.get(nodes, 0.0)) > _OFF_BY * seconds:
                step_s[nodes] = seconds
        flop = self._spec.output.flop_per_sample or record.flop_per_sample
        if step_s and (self._reported is None or (step_s, flop, layouts) != _changing_parts(self._reported)):
            self._reported = JobPace(
                step_s=step_s,
                micro_batches=record.micro_batches,
                samples=record.global_batch,
                workers=workers,
                flop_per_sample=flop,
                layouts=layouts,
                experts=record.expert_shape.experts if record.expert_shape is not None else 0,
                slots=self._spec.experts.slots,
            )


def _changing_parts(pace: JobPace) -> tuple[Mapping[int, float], float, Layouts]:
    """Return the parts of a pace that can change."""
    return pace.step_s, pace.flop_per_sample, pace.layouts
