"""The input of a forecast: a cluster, how it fails, its job, and how long the parts of a recovery take.

Each field is a key of `holdfast simulate --set`. The source of each default stands next to it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from holdfast.documents import keys_of
from holdfast.errors import BadInputError

#: units of keys, for which the reader of documents also accepts text such as "3 min"
HOURS, SECONDS = "hours", "seconds"
MOST_NODES = 100_000
MOST_HOURS = 1e9
MOST_SECONDS = 1e7
MOST_BYTES = 1e16


def _describe_key(description: str, source: str, unit: str = "") -> dict[str, Any]:
    """Return the description of a key, and the source of its default, for msgspec's `Meta`."""
    return {"description": description, "extra": {"source": source, **({"unit": unit} if unit else {})}}


def _seconds_key(description: str, source: str) -> Meta:
    return Meta(ge=0, le=MOST_SECONDS, **_describe_key(description, source, SECONDS))


def _positive_key(description: str, source: str, most: float, unit: str = "") -> Meta:
    return Meta(gt=0, le=most, **_describe_key(description, source, unit))


def _count_key(least: int, description: str, source: str) -> Meta:
    return Meta(ge=least, le=MOST_NODES, **_describe_key(description, source))


def _shape_key(description: str) -> Meta:
    return Meta(ge=0.2, le=20, **_describe_key(description, "stated: exponential"))


class JobCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job's computation, and how its state is distributed."""

    step_s: Annotated[
        float,
        _positive_key("Time of a step of the full job.", "stated: of the order of large jobs", MOST_SECONDS, SECONDS),
    ] = 10.0
    rounds: Annotated[
        int, _count_key(1, "Micro-batches of a step that each worker of the full job computes.", "stated")
    ] = 8
    experts: Annotated[
        bool,
        Meta(
            **_describe_key("Experts: an interrupted step is computed again from its start.", "stated: a dense model")
        ),
    ] = False
    copies: Annotated[
        int, _count_key(0, "Number of nodes that hold each part of the state; 0: all.", "stated: data parallel")
    ] = 0
    moved_bytes: Annotated[
        float,
        Meta(
            ge=0,
            le=MOST_BYTES,
            **_describe_key(
                "State of a lost node that must be elsewhere before the next step.", "stated: all of it is"
            ),
        ),
    ] = 0.0


class CheckpointCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the job's state is saved, and the cost of a rollback."""

    period_s: Annotated[
        float,
        _seconds_key(
            "Time between checkpoints; 0: an hour, and for restarts the optimum.",
            "stated; for restarts Daly's exact optimum",
        ),
    ] = 0.0
    save_s: Annotated[
        float, _positive_key("How long saving stops training.", "stated: it is asynchronous", MOST_SECONDS, SECONDS)
    ] = 1.0
    load_s: Annotated[float, _seconds_key("Loading a checkpoint.", "TrainMover, Table 1: 1.56 min at 8,192 GPUs")] = (
        93.6
    )


class RecoveryCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations of the parts of a live recovery, with n members of the job and w workers of these."""

    silent_share: Annotated[
        float,
        Meta(
            ge=0, le=1, **_describe_key("Share of failures that only the lease shows.", "stated: the worst case, all")
        ),
    ] = 1.0
    lease_s: Annotated[
        float, _seconds_key("How long a node counts as alive after its last heartbeat.", "the coordinator's")
    ] = 3.0
    heartbeat_s: Annotated[float, _seconds_key("Time between a node's heartbeats.", "the coordinator's")] = 0.5
    tick_s: Annotated[float, _seconds_key("Time between the coordinator's checks of leases.", "the coordinator's")] = (
        0.1
    )
    reset_s: Annotated[
        float,
        _seconds_key("Time until a failure that ends a connection is noticed.", "measured: benchmarks/recovery.py"),
    ] = 0.013
    decide_s: Annotated[
        float,
        _seconds_key(
            "decide = decide_s + n decide_per_node_s.",
            "measured: benchmarks/control_plane.py, 16 nodes: the clock beyond the processor",
        ),
    ] = 0.013
    decide_per_node_s: Annotated[
        float,
        _seconds_key(
            "See decide_s.", "measured: the same, 16 to 256 nodes x 8: the coordinator's processor to the last report"
        ),
    ] = 370e-6
    tell_s: Annotated[
        float,
        _seconds_key(
            "tell = tell_s + n tell_per_node_s.", "measured: benchmarks/control_plane.py: not distinguishable from 0"
        ),
    ] = 0.0
    tell_per_node_s: Annotated[
        float,
        _seconds_key(
            "See tell_s.", "measured: the same, 16 to 256 nodes x 8: its processor from there to the last Begin"
        ),
    ] = 210e-6
    groups: Annotated[
        Literal["nccl", "gloo"],
        Meta(**_describe_key("Backend of the workers' groups: nccl or gloo.", "stated: NVIDIA GPUs")),
    ] = "nccl"
    nccl_s: Annotated[
        float,
        _seconds_key("regroup = nccl_s + w nccl_per_worker_s.", "TrainMover, 5.1: 50 s for 64 GPUs, 7 groups each"),
    ] = 50.0
    nccl_per_worker_s: Annotated[
        float, _seconds_key("See nccl_s.", "TrainMover, Table 1: 1.09 min for 8,192 GPUs, a line through both")
    ] = 0.0019
    gloo_s: Annotated[
        float,
        _seconds_key(
            "regroup = gloo_s + w gloo_per_worker_s.",
            "measured: benchmarks/levels.py, 4 to 64 workers; beyond them extrapolated",
        ),
    ] = 0.003
    gloo_per_worker_s: Annotated[
        float, _seconds_key("See gloo_s.", "measured: the same: processor of a rank, as if on a core of its own")
    ] = 0.00045
    bytes_per_s: Annotated[
        float,
        _positive_key(
            "transfer = moved_bytes / bytes_per_s.",
            "measured: benchmarks/transfer.py, 512 MB in two checked streams over the loopback",
            MOST_BYTES,
        ),
    ] = 0.55e9
    join_s: Annotated[
        float, _seconds_key("How long a joining node stops the others.", "measured: benchmarks/recovery.py, 4 workers")
    ] = 0.08


class RestartCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Duration of a restart of all workers from the newest checkpoint, for comparison."""

    detect_s: Annotated[float, _seconds_key("Time until a failure is noticed.", "stated: as by a lease of 3 s")] = 2.8
    restart_s: Annotated[
        float,
        _seconds_key(
            "Time from there until training continues, including loading the checkpoint.",
            "TrainMover, Table 1: 6.47 min at 8,192 GPUs",
        ),
    ] = 388.2


class FleetCase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster, a job on it, and the cost of its failures."""

    nodes: Annotated[int, _count_key(1, "Nodes of the full job.", "stated")] = 1024
    workers_per_node: Annotated[int, Meta(ge=1, le=1024, **_describe_key("Workers on each node.", "stated"))] = 8
    standbys: Annotated[int, _count_key(0, "Additional nodes, warm and idle.", "stated")] = 0
    min_nodes: Annotated[int, _count_key(1, "With fewer nodes the job waits.", "stated: it goes on with any")] = 1
    mtbf_hours: Annotated[
        float,
        _positive_key(
            "Mean time between failures of a node.",
            "Llama 3: 419 interruptions of 2,048 nodes in 54 days",
            MOST_HOURS,
            HOURS,
        ),
    ] = 6334.0
    mttr_hours: Annotated[
        float,
        _positive_key(
            "Mean time to repair of a node.",
            "stepfun-ai/InfiniteHBD-Trace, 584 repairs (docs/spares.md)",
            MOST_HOURS,
            HOURS,
        ),
    ] = 133.0
    failure_shape: Annotated[
        float, _shape_key("Weibull shape of the gaps between the cluster's failures; 1: exponential.")
    ] = 1.0
    repair_shape: Annotated[float, _shape_key("Weibull shape of repairs; 1: exponential.")] = 1.0
    rack_nodes: Annotated[int, _count_key(1, "Nodes of a rack, which fail together if it fails.", "stated")] = 1
    mtbf_rack_hours: Annotated[
        float,
        Meta(
            ge=0,
            le=MOST_HOURS,
            **_describe_key(
                "Mean time between failures of one whole rack; 0: they never fail.", "stated: never", HOURS
            ),
        ),
    ] = 0.0
    job: JobCase = JobCase()
    checkpoint: CheckpointCase = CheckpointCase()
    recovery: RecoveryCase = RecoveryCase()
    restart: RestartCase = RestartCase()

    @property
    def all_nodes(self) -> int:
        """The job's nodes and its standbys."""
        return self.nodes + self.standbys

    @property
    def failures_per_hour(self) -> float:
        """Rate of failures of the full job's nodes and racks, without its standbys, while all are up."""
        racks = self.nodes / self.rack_nodes / self.mtbf_rack_hours if self.mtbf_rack_hours else 0.0
        return self.nodes / self.mtbf_hours + racks

    def step_on(self, nodes: int) -> float:
        """Return the seconds of a step on fewer nodes: as many rounds as the worker with most micro-batches has."""
        rounds = -(-self.nodes * self.job.rounds // nodes)
        return self.job.step_s * rounds / self.job.rounds


def check_case(case: FleetCase) -> FleetCase:
    """Return the case after checking that its values fit together.

    Raises:
        BadInputError: two values contradict each other. The message names both, and the rule.
    """
    if case.min_nodes > case.nodes:
        raise BadInputError(f"min_nodes is {case.min_nodes}: it must be at most nodes, {case.nodes}")
    if case.job.copies > case.nodes:
        raise BadInputError(f"job.copies is {case.job.copies}: it must be at most nodes, {case.nodes}")
    if case.rack_nodes > case.all_nodes:
        raise BadInputError(f"rack_nodes is {case.rack_nodes}: it must be at most nodes and standbys, {case.all_nodes}")
    if case.recovery.heartbeat_s > case.recovery.lease_s:
        raise BadInputError(
            f"recovery.heartbeat_s is {case.recovery.heartbeat_s:g}: it must be at most recovery.lease_s, "
            f"{case.recovery.lease_s:g}"
        )
    if case.checkpoint.period_s and case.checkpoint.save_s > case.checkpoint.period_s:
        raise BadInputError(
            f"checkpoint.save_s is {case.checkpoint.save_s:g}: it must be at most checkpoint.period_s, "
            f"{case.checkpoint.period_s:g}"
        )
    return case


def default_sources() -> dict[str, str]:
    """Return the source of each key's default."""
    return {name: str(key.extra["source"]) for name, key in keys_of(FleetCase).items()}
