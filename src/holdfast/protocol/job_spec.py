"""The description of a job: the keys of job.toml, which options set as well, and from which the schema is made."""

from __future__ import annotations

import os.path
import re
from typing import Annotated, Literal

from msgspec import Meta, Struct, structs

from holdfast.errors import BadInputError
from holdfast.protocol.names import NAME_PATTERN
from holdfast.storage import is_url
from holdfast.units import WorkTime, parse_work_time

#: For the reader of job.toml: a number with a unit, or a path relative to the file's folder.
SECONDS = {"unit": "seconds"}
PER_WORK = {"unit": "per work"}
PER_SECOND = {"unit": "bytes per second"}
PATH = {"path": True}
PATH_OR_URL = {"path": True, "url": True}

RESTART_ALL = "restart-all"
AUTO = "auto"
#: the library that exchanges CUDA tensors between workers
Backend = Literal["auto", "nccl", "gloo"]
#: restarts of a node's processes within `coordination.failures.budget.WINDOW_S`
MAX_RESTARTS = 5
#: steps in a row with gradients that are not finite, before the job fails
MAX_SKIPPED_STEPS = 10
#: Largest whole number. It fits into all formats and messages.
MOST = 1_000_000_000
#: Most FLOP of a sample, and most FLOP/s. A larger number is a mistake, and could make results infinite.
MOST_FLOP = 1e30
#: A shorter step time that is not 0 cannot have been measured.
LEAST_STEP_S = 1e-9
#: Seconds between two reports of a node's compute times, from which slow nodes are found.
OWN_TIMES_S = 5.0

#: A name, or "". The lookahead is needed because $ in Python also matches before a newline.
_NAME_OR_NONE = f"^$(?!\\n)|{NAME_PATTERN}(?!\\n)"


class CheckpointSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints and snapshots."""

    dir: Annotated[
        str,
        Meta(description="Folder or URL for checkpoints, to resume from.", extra=PATH_OR_URL),
    ] = ""
    every: Annotated[
        Annotated[int, Meta(ge=1, le=MOST)] | Literal["auto"],
        Meta(description="Steps between checkpoints. auto: chosen by their cost and the frequency of failures."),
    ] = AUTO
    rate: Annotated[
        float,
        Meta(ge=0, description="Most checkpoint bytes a node writes per second. 0: no limit.", extra=PER_SECOND),
    ] = 0.0
    snapshot_every: Annotated[int, Meta(ge=0, le=MOST, description="Steps between snapshots in memory; 0: none.")] = 0
    snapshot_dir: Annotated[str, Meta(description="Folder for snapshots (default: /dev/shm).", extra=PATH)] = ""


class ExpertSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Placement of the experts of MoE layers."""

    slots: Annotated[int, Meta(ge=1, le=65535, description="Expert replicas per node and MoE layer.")] = 6
    placement: Annotated[
        Literal["best", "mro", "spread", "compact"], Meta(description="How expert replicas are placed.")
    ] = "best"
    rebalance_every: Annotated[
        int,
        Meta(ge=0, le=MOST, description="Steps between checks whether to move experts. 0: only after repairs."),
    ] = 200


class RecoverySpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reactions to failures and to joining nodes."""

    on_node_failure: Annotated[
        Literal["auto", "standby", "shrink", "wait", "restart-all"],
        Meta(
            description="How to continue after the loss of a node. auto, standby: a warm standby takes its place, or "
            "the others continue. shrink: the others continue. wait: until there are as many nodes as before. "
            "restart-all: all workers restart from the newest checkpoint, also if a node joins."
        ),
    ] = "auto"
    standbys: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="Warm nodes that wait to replace lost ones.",
        ),
    ] = 0
    stragglers: Annotated[
        Literal["ask", "move", "off"],
        Meta(
            description="Reaction to slow nodes. A node is slow if it computes 1.1 times as long as the median of "
            "the others, for longer than by chance. ask: report it. move: also give its place to a warm standby."
        ),
    ] = "ask"
    on_process_failure: Annotated[
        Literal["auto", "shrink", "hold"],
        Meta(
            description="How to continue after the loss of a process. shrink, auto: without it, until another one "
            "joins. hold: wait for its replacement."
        ),
    ] = "auto"
    fault_threshold: Annotated[
        int, Meta(ge=1, le=MOST, description="Nodes that hold a copy of each expert. Fewer if there is no room.")
    ] = 2
    join_window: Annotated[
        float,
        Meta(
            ge=0,
            description="Time to wait for further nodes that join.",
            extra=SECONDS,
        ),
    ] = 0.0
    grace: Annotated[
        float,
        Meta(
            ge=0,
            description="Time for a node to leave after SIGTERM.",
            extra=SECONDS,
        ),
    ] = 0.0
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="Process restarts in 5 min before a node is removed.",
        ),
    ] = MAX_RESTARTS
    max_skipped_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="Skipped steps in a row that end the job; 0: never. A step is skipped if its gradients are "
            "NaN or infinite, or if the script skips all its micro-batches. Steps that a GradScaler skips to lower its "
            "scale do not count.",
        ),
    ] = MAX_SKIPPED_STEPS
    preflight: Annotated[
        str, Meta(description="Health check to run before a node joins. A non-zero exit code rejects the node.")
    ] = ""
    failure_classes: Annotated[
        str, Meta(description="File with failure classes of this site. They precede the built-in ones.", extra=PATH)
    ] = ""

    @property
    def restarts_all(self) -> bool:
        """Whether all workers restart at every change."""
        return self.on_node_failure == RESTART_ALL

    @property
    def uses_standbys(self) -> bool:
        """Whether a standby replaces a lost node."""
        return self.on_node_failure in ("auto", "standby", "wait")

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the job waits for another node if one is lost."""
        return self.on_node_failure == "wait"

    @property
    def holds_ranks(self) -> bool:
        """Whether the job waits for a process that restarts."""
        return self.on_process_failure == "hold"


class OutputSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output files, printed output and alerts."""

    events: Annotated[str, Meta(description="File for the job's events, as JSON lines.", extra=PATH)] = ""
    metrics_file: Annotated[
        str,
        Meta(
            description="File for loss and logged values. FILE.jsonl, FILE.csv, or a folder for TensorBoard.",
            extra=PATH,
        ),
    ] = ""
    log_dir: Annotated[
        str,
        Meta(description="Folder with a file of each worker's output.", extra=PATH),
    ] = ""
    print: Annotated[
        Literal["all", "rank0", "failed"],
        Meta(description="Workers whose output is printed. failed: the end of the output of failed workers."),
    ] = "all"
    alert: Annotated[
        str,
        Meta(description="Program or URL for urgent events. A program gets them as JSON on stdin."),
    ] = ""
    flop_per_sample: Annotated[
        float,
        Meta(ge=0, le=MOST_FLOP, description="FLOP to train on one sample, for MFU."),
    ] = 0.0
    peak_flop_per_s: Annotated[
        float, Meta(ge=0, le=MOST_FLOP, description="Peak FLOP/s of one accelerator, for MFU.")
    ] = 0.0


class PaceSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured step times by number of nodes (`holdfast calibrate`)."""

    step_s: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1e9)], ...],
        Meta(max_length=4096, description="Seconds of a step with 1, 2, ... nodes; 0 where that was not measured."),
    ] = ()
    micro_batches: Annotated[int, Meta(ge=0, le=MOST, description="Of a step.")] = 0
    samples: Annotated[int, Meta(ge=0, le=MOST, description="Of a step.")] = 0
    places: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1024)], ...],
        Meta(max_length=1024, description="Of a replica with 1, 2, ... nodes, with more as with the last; none: 1."),
    ] = ()

    @property
    def known(self) -> dict[int, float]:
        """Measured seconds of a step, by number of nodes."""
        return {nodes: seconds for nodes, seconds in enumerate(self.step_s, 1) if seconds}

    def check(self) -> None:
        """Refuse steps that cannot have been measured.

        Raises:
            BadInputError: with the number of nodes and the value.
        """
        for nodes, seconds in self.known.items():
            if seconds < LEAST_STEP_S:
                raise BadInputError(
                    f"pace.step_s says that a step with {nodes} nodes takes {seconds:g} s: give seconds, "
                    f"{LEAST_STEP_S:g} or more, or 0 where that was not measured"
                )

    @property
    def slower(self) -> dict[int, int]:
        """Numbers of nodes with which a step takes longer than with fewer, each with the fastest smaller number."""
        found: dict[int, int] = {}
        fastest = 0
        for nodes, seconds in enumerate(self.step_s, 1):
            if seconds and fastest and seconds > self.step_s[fastest - 1]:
                found[nodes] = fastest
            elif seconds:
                fastest = nodes
        return found


class ExperimentSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Baselines, emulation and checks. Training does not need them."""

    static_experts: Annotated[
        bool,
        Meta(description="Baseline: static expert parallelism. Experts are divided equally; other nodes wait."),
    ] = False
    ep_size: Annotated[
        int,
        Meta(ge=0, le=MOST, description="With static experts: nodes per replica. 0: as few as possible."),
    ] = 0
    emulate_compute: Annotated[
        str,
        Meta(
            description="Emulate an accelerator. Expert computation takes this long for each token, or all computation "
            "for each micro-batch.",
            extra=PER_WORK,
        ),
    ] = ""
    verify_state: Annotated[
        int,
        Meta(ge=0, le=MOST, description="Steps between comparisons of all replicas' state. Slow; 0: never."),
    ] = 0
    allow_faults: Annotated[bool, Meta(description="Allow `holdfast inject` in this job.")] = False
    watch: Annotated[
        bool,
        Meta(description="Look where workers stand; without it what hangs is found only once gloo gives up."),
    ] = True
    own_times_every: Annotated[
        float,
        Meta(
            gt=0,
            description="Nodes tell so often how long they compute a micro-batch; who is slow is found by many words.",
            extra=SECONDS,
        ),
    ] = OWN_TIMES_S

    @property
    def emulated(self) -> WorkTime:
        """The emulated work and its duration; 0 seconds without emulation."""
        return parse_work_time(self.emulate_compute or "0")

    @property
    def emulated_seconds(self) -> dict[str, float]:
        """The emulated seconds per token and per micro-batch, as fields of the event `job_started`."""
        emulated = self.emulated
        return {"emulated_token_s": emulated.of("token"), "emulated_micro_batch_s": emulated.of("micro-batch")}


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job: its script, its nodes, and its reactions to failures.

    Commands make it from a file, `--set` and options. Coordinator, agents and workers get it unchanged.
    """

    format: Annotated[Literal[1], Meta(description="The layout of this file.")] = 1
    name: Annotated[str, Meta(pattern=_NAME_OR_NONE, description="The job's name; by default the script's.")] = ""
    script: Annotated[str, Meta(description="The training script.", extra=PATH)] = ""
    module: Annotated[str, Meta(description="A module to run in place of a script, as `python -m` does.")] = ""
    args: Annotated[tuple[str, ...], Meta(description="The script's arguments.")] = ()
    min_nodes: Annotated[
        int, Meta(ge=0, le=MOST, description="Nodes that have to come before the first step; 0: all of max_nodes.")
    ] = 0
    max_nodes: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST,
            description="Number of nodes. Training starts with MIN nodes, or with all N.",
        ),
    ] = 4
    workers_per_node: Annotated[int, Meta(ge=1, le=1024, description="Worker processes on each node.")] = 1
    backend: Annotated[
        Backend,
        Meta(
            description="Library that exchanges CUDA tensors between workers. gloo: through host memory; several "
            "workers can share a GPU. auto: nccl, or gloo if torch has no NCCL."
        ),
    ] = AUTO
    sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=MOST)], ...],
        Meta(description="In a pool: the numbers of nodes that the job can run on, where not all up to max_nodes do."),
    ] = ()
    weight: Annotated[
        float, Meta(gt=0, le=1000, description="In a pool: what the job counts beside others; 0.5 to 2 is advised.")
    ] = 1.0
    priority: Annotated[
        int,
        Meta(
            ge=-MOST,
            le=MOST,
            description="In a pool that shares by priority: those of the greatest get their nodes first.",
        ),
    ] = 0
    preemptible: Annotated[
        bool,
        Meta(description="In a pool: the job runs on what all others leave over, and gives it back when it is needed."),
    ] = False
    snooze: Annotated[
        float,
        Meta(
            ge=0,
            description="In a pool: after the job has grown, it grows no further for this time.",
            extra=SECONDS,
        ),
    ] = 0.0
    time_limit: Annotated[
        float,
        Meta(
            ge=0,
            description="Save and end the job after this time. The exit code is 75 then; 0: no limit.",
            extra=SECONDS,
        ),
    ] = 0.0
    checkpoint: CheckpointSpec = CheckpointSpec()
    experts: ExpertSpec = ExpertSpec()
    recovery: RecoverySpec = RecoverySpec()
    output: OutputSpec = OutputSpec()
    pace: PaceSpec = PaceSpec()
    experiments: ExperimentSpec = ExperimentSpec()

    @property
    def nodes_to_begin(self) -> int:
        """Nodes that must join before the first step."""
        return self.min_nodes or self.max_nodes

    def settled(self, folder: str) -> JobSpec:
        """Return the job with a name, by default made of its script's, and with absolute paths. URLs and "" stay.

        Args:
            folder: absolute; relative paths are relative to it.
        """

        def absolute(path: str) -> str:
            return os.path.join(folder, path) if path and not is_url(path) else path

        stem = os.path.splitext(os.path.basename(self.script))[0]
        return structs.replace(
            self,
            name=self.name or re.sub(r"[^A-Za-z0-9._-]", "-", stem).lstrip(".-_")[:64] or "job",
            script=absolute(self.script),
            checkpoint=structs.replace(
                self.checkpoint,
                dir=absolute(self.checkpoint.dir),
                snapshot_dir=absolute(self.checkpoint.snapshot_dir),
            ),
            recovery=structs.replace(self.recovery, failure_classes=absolute(self.recovery.failure_classes)),
            output=structs.replace(
                self.output,
                events=absolute(self.output.events),
                log_dir=absolute(self.output.log_dir),
                metrics_file=absolute(self.output.metrics_file),
            ),
        )
