"""How fast a job trains, and what failures cost it, for its pool's plan: told when it is known, and again once it is
off by a tenth."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import asdict

from holdfast.coordination.config import CoordinatorConfig
from holdfast.coordination.layouts.choosing import layouts_by_nodes
from holdfast.coordination.progress.costs import Cost, MeasuredCosts
from holdfast.coordination.turn import Transaction
from holdfast.protocol.layouts.several import Layouts
from holdfast.protocol.pool.sharing import JobCosts, JobPace

#: the steps are looked at every so many seconds: each of a pool's many jobs is asked at every tick
_EVERY_S = 2.0
#: a step that takes so much more or less is told anew: each time the pool writes it down
_OFF_BY = 0.1
#: which layout belongs to more nodes than so many is not told
_MOST_NODES = 1024


class Pacing:
    """Keeps what was told."""

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
        self._told: JobPace | None = None
        self._costs_told = JobCosts()
        self._saves_every_s = saves_every_s
        self._looks_at = 0.0

    @property
    def pace(self) -> JobPace | None:
        """What is known, None before a step's time is."""
        transaction = self._transaction
        if transaction.now >= self._looks_at:
            self._looks_at = transaction.now + _EVERY_S
            self._look()
        return self._told

    @property
    def costs(self) -> JobCosts:
        """What failures have cost; the same object as long as it is much the same."""
        return self._costs_told

    def _look_at_costs(self) -> None:
        found = {
            cost.value: self._costs.of(cost)
            for cost in (Cost.HIT, Cost.REPLACED, Cost.ROLLED_BACK)
            if self._costs.is_measured(cost)
        }
        found["saves_every_s"] = self._saves_every_s() or 0.0
        told = asdict(self._costs_told)
        if any(abs(seconds - told[name]) > _OFF_BY * seconds for name, seconds in found.items()):
            self._costs_told = JobCosts(**found)

    def _look(self) -> None:
        self._look_at_costs()
        workers, record = self._spec.workers_per_node, self._transaction.record
        layouts = layouts_by_nodes(record, nodes=min(self._spec.max_nodes, _MOST_NODES), workers=workers)
        step_s = dict(self._told.step_s) if self._told is not None and self._told.layouts == layouts else {}
        for world, seconds in self._costs.paces().items():
            nodes, more = divmod(world, workers)
            if not more and abs(seconds - step_s.get(nodes, 0.0)) > _OFF_BY * seconds:
                step_s[nodes] = seconds
        flop = self._spec.output.flop_per_sample or record.flop_per_sample
        if step_s and (self._told is None or (step_s, flop, layouts) != _what_changes(self._told)):
            self._told = JobPace(
                step_s=step_s,
                micro_batches=record.micro_batches,
                samples=record.global_batch,
                workers=workers,
                flop_per_sample=flop,
                layouts=layouts,
                experts=record.expert_shape.experts if record.expert_shape is not None else 0,
                slots=self._spec.experts.slots,
            )


def _what_changes(pace: JobPace) -> tuple[Mapping[int, float], float, Layouts]:
    return pace.step_s, pace.flop_per_sample, pace.layouts
