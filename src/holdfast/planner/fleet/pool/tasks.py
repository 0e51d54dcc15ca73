"""A job in the simulation of a pool over months: the time of a step by number of nodes, and the job's weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import CheckpointSpec, JobSpec, OutputSpec, PaceSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetTask:
    """One job, which never ends."""

    name: str
    #: seconds of a step with 1, 2, ... nodes; 0 for a number of nodes that it cannot run on
    step_s: tuple[float, ...]
    #: FLOP of one step
    flop: float
    #: Unicron's w(t)
    weight: float = 1.0
    #: smallest number of nodes
    least: int = 1
    #: largest number of nodes; 0 for as many as `step_s` covers
    most: int = 0
    #: numbers of nodes that it can run on, ascending; () for all from `least` to `most`
    sizes: tuple[int, ...] = ()
    #: achieved FLOP/s with 0, 1, ... nodes, without the weight; 0 for a number of nodes that it cannot run on
    achieves: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Check the job, and compute `achieves`.

        Raises:
            BadInputError: a value is wrong. The message names the job, the value and the rule.
        """
        if not self.flop > 0:
            raise BadInputError(f"job {self.name}: a step has {self.flop:g} FLOP; give output.flop_per_sample")
        if not 1 <= self.least <= self.largest <= len(self.step_s):
            raise BadInputError(
                f"job {self.name}: {self.least} to {self.largest} nodes, and its steps are known for up to "
                f"{len(self.step_s)}: give [pace] for all of them (holdfast calibrate)"
            )
        unknown = [nodes for nodes in (self.least, self.largest) if not self.step_s[nodes - 1] > 0]
        if unknown:
            raise BadInputError(f"job {self.name}: the time of a step with {unknown[0]} nodes is missing")
        rates = (self.flop / step if step > 0 else 0.0 for step in self.step_s)
        object.__setattr__(self, "achieves", (0.0, *rates))

    @property
    def largest(self) -> int:
        """The largest number of nodes that it can use."""
        return self.most or len(self.step_s)

    def waf(self, nodes: int) -> float:
        """Return the weighted achieved FLOP/s with this many nodes. Nodes beyond the largest number stay idle.

        It is 0 below the least number, and for a number that is not one of the job's `sizes`, if it has any.
        """
        held = min(nodes, self.largest)
        if held < self.least or (self.sizes and held not in self.sizes):
            return 0.0
        return self.weight * self.achieves[held]

    @property
    def spec(self) -> JobSpec:
        """The job as it is submitted to a pool.

        It saves checkpoints, so that lost work has no weight in the pool's plans.
        """
        return JobSpec(
            name=self.name,
            script="train.py",
            min_nodes=self.least,
            max_nodes=self.largest,
            sizes=self.sizes,
            weight=self.weight,
            output=OutputSpec(flop_per_sample=self.flop),
            checkpoint=CheckpointSpec(dir="/saved"),
            pace=PaceSpec(step_s=self.step_s, micro_batches=1, samples=1),
        )


def check_capacity(tasks: Sequence[FleetTask], nodes: int) -> None:
    """Check that a pool has enough nodes for the jobs.

    Raises:
        BadInputError: no job is given, their minimums exceed the number of nodes, or two have the same name.
    """
    if not tasks:
        raise BadInputError("there is no job: give at least one")
    names = [task.name for task in tasks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInputError(f"two jobs have the name {twice[0]!r}: give one of them another")
    needed = sum(task.least for task in tasks)
    if needed > nodes:
        raise BadInputError(f"{nodes} nodes are too few: together the {len(tasks)} jobs need at least {needed}")
