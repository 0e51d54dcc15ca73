"""The options that `holdfast run` and `holdfast replay` share, declared once."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from holdfast.control.agent.zygote import PRELOAD
from holdfast.control.launch.settings import LaunchSettings
from holdfast.control.registry import registry_directory
from holdfast.coordination.config import RECONFIGURE, RESTART

Script = Annotated[Path, typer.Argument(help="The training script.", metavar="SCRIPT")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")]
Slots = Annotated[int, typer.Option(help="A node's room for expert replicas in each MoE layer.")]
FaultThreshold = Annotated[
    int, typer.Option(help="On how many distinct nodes each expert is to live, where there is room.")
]
Strategy = Annotated[str, typer.Option(help="How expert replicas are placed: best, mro, spread or compact.")]
RebalanceEvery = Annotated[
    int,
    typer.Option(help="Steps between looks at whether it pays to move experts after their loads; 0: never."),
]
JoinWindow = Annotated[
    float, typer.Option(help="Seconds without another arrival before newcomers are taken in, together.")
]

StaticExperts = Annotated[
    bool,
    typer.Option(
        "--static-experts",
        help="Baseline: classic expert parallelism. Experts are divided equally, nodes beyond a multiple stay idle.",
    ),
]
EpSize = Annotated[
    int,
    typer.Option(help="With --static-experts: nodes that share one replica of all experts.", show_default="least"),
]
OnFailure = Annotated[
    str,
    typer.Option(
        metavar="|".join((RECONFIGURE, RESTART)),
        help="Baseline: restart all workers from the newest checkpoint when nodes fail or come.",
    ),
]
EmulateCompute = Annotated[
    float, typer.Option(help="Emulate an accelerator: expert computation takes this many seconds per token.")
]
VerifyState = Annotated[
    bool, typer.Option("--verify-state", help="Compare the hashes of all replicas after every step (slow).")
]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """One field per option; a field's default is the option's."""

    workers_per_node: Annotated[int, typer.Option(help="Worker processes on each node.")] = 1
    events: Annotated[Path | None, typer.Option(help="Write the job's events to this file, a JSON object a line.")] = (
        None
    )
    store: Annotated[
        str,
        typer.Option(
            help="Where the coordinator keeps its state: sqlite:PATH or memory:.", show_default="in the job's folder"
        ),
    ] = ""
    checkpoint: Annotated[Path | None, typer.Option(help="Keep checkpoints in this folder, and resume from them.")] = (
        None
    )
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100
    slots: Slots = 6
    fault_threshold: FaultThreshold = 2
    strategy: Strategy = "best"
    static_experts: StaticExperts = False
    ep_size: EpSize = 0
    on_failure: OnFailure = RECONFIGURE
    emulate_compute: EmulateCompute = 0.0
    rebalance_every: RebalanceEvery = 200
    allow_faults: Annotated[bool, typer.Option("--allow-faults", help="Allow `holdfast fail` in this job.")] = False
    port: Annotated[int, typer.Option(help="The coordinator's port; 0: a free one.")] = 0
    job: Annotated[str, typer.Option(help="The job's name.", show_default="the script's")] = ""
    job_dir: Annotated[
        Path | None, typer.Option(help="Keep the job's files here.", show_default="a temporary folder")
    ] = None
    preload: Annotated[
        str,
        typer.Option(
            help="Modules to import once, before workers are forked: NAME,NAME,...", show_default="torch and more"
        ),
    ] = ",".join(PRELOAD)
    zygote: Annotated[
        str,
        typer.Option(
            metavar="SOCKET",
            help="Fork workers from this zygote, which runs already.",
            show_default="one of the job's own",
        ),
    ] = ""
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also in a terminal.")] = False
    verify_state: VerifyState = False

    def settings(self, script: Path, args: list[str] | None) -> LaunchSettings:
        """Return what the launcher is told; which nodes there are is the command's own business."""
        return LaunchSettings(
            script=script,
            args=tuple(args or ()),
            workers_per_node=self.workers_per_node,
            job=self.job,
            events=self.events,
            store=self.store,
            port=self.port,
            checkpoint_dir=self.checkpoint,
            checkpoint_every=self.checkpoint_every,
            allow_faults=self.allow_faults,
            verify_state=self.verify_state,
            slots=self.slots,
            fault_threshold=self.fault_threshold,
            strategy=self.strategy,
            static_experts=self.static_experts,
            ep_size=self.ep_size,
            on_failure=self.on_failure,
            emulate_compute=self.emulate_compute,
            rebalance_every=self.rebalance_every,
            job_dir=self.job_dir,
            registry=registry_directory(os.environ),
            environment=worker_environment(dict(os.environ)),
            preload=tuple(name for name in self.preload.split(",") if name),
            zygote=self.zygote,
        )


def with_launch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of LaunchOptions, in place of its parameter `options`."""
    own = inspect.signature(command, eval_str=True)
    hints = get_type_hints(LaunchOptions, include_extras=True)
    names = {field.name for field in dataclasses.fields(LaunchOptions)}
    shared = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(LaunchOptions)
    ]

    def with_options(**values: Any) -> None:
        options = LaunchOptions(**{name: values.pop(name) for name in names})
        command(**values, options=options)

    parameters = [p for name, p in own.parameters.items() if name != "options"]
    by_name = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*parameters, *shared)]
    with_options.__signature__ = own.replace(parameters=by_name)
    with_options.__annotations__ = {p.name: p.annotation for p in by_name}
    with_options.__doc__ = command.__doc__
    return with_options


def worker_environment(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment for workers: one thread each, unless the user says otherwise (as torchrun does)."""
    environment.setdefault("OMP_NUM_THREADS", "1")
    return environment
