"""`holdfast coordinator` and `holdfast agent`: a job's pieces on several machines."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.job.launch_options import (
    FaultThreshold,
    JoinWindow,
    RebalanceEvery,
    Slots,
    Strategy,
    VerifyState,
    worker_environment,
)
from holdfast.cli.job.run import warn
from holdfast.control.agent.node_agent import run_agent
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.client import CoordinatorClient
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.launch.known_checkpoints import intact_checkpoints
from holdfast.control.launch.settings import (
    check_creatable_folder,
    check_expert_options,
    check_writable_file,
    script_digest,
)
from holdfast.control.registry import JobEntry, check_name, find_job, registry_directory
from holdfast.coordination.agent.machine import TAIL_FAILED
from holdfast.coordination.config import CoordinatorConfig
from holdfast.errors import EXIT_FAILED, BadInputError, UnreachableError
from holdfast.protocol.names import RACK_PATTERN

Token = Annotated[
    str | None, typer.Option(envvar="HOLDFAST_TOKEN", help="The job's secret; agents and commands must show it.")
]


#: between two looks for a coordinator that is not up yet
_PAUSE_S = 0.5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("coordinator")(coordinator)
    app.command("agent", context_settings={"allow_interspersed_args": False})(agent)


def coordinator(
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs --token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.")] = 0,
    token: Token = None,
    job: Annotated[str, typer.Option(help="The job's name.")] = "job",
    store: Annotated[str, typer.Option(help="Where to keep the job's state: sqlite:PATH or memory:.")] = "memory:",
    events: Annotated[
        Path | None, typer.Option(help="Write the job's events to this file, a JSON object a line.")
    ] = None,
    start_nodes: Annotated[int, typer.Option(help="Nodes to wait for before the first step.")] = 1,
    fault_threshold: FaultThreshold = 2,
    strategy: Strategy = "best",
    rebalance_every: RebalanceEvery = 200,
    join_window: JoinWindow = 0.0,
    allow_faults: Annotated[bool, typer.Option("--allow-faults", help="Allow `holdfast fail` in this job.")] = False,
    certfile: Annotated[Path | None, typer.Option(help="Serve TLS with this certificate.")] = None,
    keyfile: Annotated[Path | None, typer.Option(help="The certificate's key.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The job's checkpoints, to resume from.")] = None,
) -> None:
    """Run a job's coordinator; agents on any machine connect to it. Ends with the job, and with its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if start_nodes < 1:
        raise BadInputError(f"--start-nodes is {start_nodes}: it must be at least 1")
    if events is not None:
        check_writable_file("--events", events)
    check_expert_options(
        fault_threshold=fault_threshold, join_window=join_window, strategy=strategy, rebalance_every=rebalance_every
    )
    if checkpoint is not None:
        check_creatable_folder("--checkpoint", checkpoint)
    settings = ServerSettings(
        config=CoordinatorConfig(
            job=job,
            start_nodes=start_nodes,
            allow_faults=allow_faults,
            fault_threshold=fault_threshold,
            strategy=strategy,
            rebalance_every=rebalance_every,
            join_window_s=join_window,
        ),
        host=host,
        port=port,
        token=token,
        store=store,
        events=events,
        certfile=certfile,
        keyfile=keyfile,
        registry=registry_directory(os.environ),
        checkpoints=intact_checkpoints(checkpoint, warn),
    )
    from holdfast.control.coordinator.server import run_coordinator  # 0.5 s of imports that no other command needs

    raise typer.Exit(run_coordinator(settings))


def job_at(entry: JobEntry, say: Callable[[str], None]) -> str:
    """Return the name of the job at an address; a coordinator that is not up yet is waited for.

    Raises:
        BadInputError: the coordinator refuses, for example the token. UntrustedError: TLS fails.
    """
    told = ""
    with CoordinatorClient(entry) as client:
        while True:
            try:
                return client.status()["job"]
            except UnreachableError as error:
                if str(error) != told:
                    told = str(error)
                    say(f"holdfast: {told}; waiting for it")
                time.sleep(_PAUSE_S)


def agent(
    script: Annotated[Path, typer.Argument(help="The training script.", metavar="SCRIPT")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="The coordinator's URL.", show_default="this machine's job")
    ] = None,
    token: Token = None,
    node: Annotated[
        str, typer.Option(help="This node's name, unique in the job.", show_default="the host's, and the pid")
    ] = "",
    workers: Annotated[int, typer.Option(help="Worker processes on this node.")] = 1,
    host: Annotated[str, typer.Option(help="Address at which the other nodes reach this one.")] = "127.0.0.1",
    cafile: Annotated[str, typer.Option(help="Certificates to trust.", show_default="the system's")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Keep checkpoints in this (shared) folder.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    slots: Slots = 6,
    rack: Annotated[
        str, typer.Option(help="Nodes that may fail together name the same rack.", show_default="a rack of its own")
    ] = "",
    verify_state: VerifyState = False,
) -> None:
    """Run one node of a job: an agent with its workers. Ends with the node's part in the job.

    It may be started before the coordinator, and waits for it.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    if not script.is_file():
        raise BadInputError(f"there is no script {script}: give the path of a Python file")
    if not 1 <= workers <= 1024:
        raise BadInputError(f"--workers is {workers}: it must lie between 1 and 1024")
    check_expert_options(slots)
    if node:
        check_name("--node", node)
    if not re.match(RACK_PATTERN, rack):
        raise BadInputError(f"--rack is {rack!r}: use letters, digits, dots, dashes, at most 64")
    if checkpoint is not None:
        check_creatable_folder("--checkpoint", checkpoint)
    entry = find_job(registry_directory(os.environ), coordinator, token, cafile)
    job = job_at(entry, warn)
    folder = tempfile.mkdtemp(prefix="holdfast-")
    try:
        settings = AgentSettings(
            coordinator=entry.url,
            token=entry.token,
            job=job,
            node=node or f"{socket.gethostname().split('.')[0]}-{os.getpid()}",
            script=str(script.absolute()),
            folder=folder,
            digest=script_digest(script, tuple(args or ())),
            workers=workers,
            host=host,
            args=tuple(args or ()),
            cwd=os.getcwd(),
            environment=worker_environment(dict(os.environ)),
            checkpoint_dir=str(checkpoint.absolute()) if checkpoint else "",
            checkpoint_every=checkpoint_every,
            slots=slots,
            rack=rack,
            verify_state=verify_state,
            cafile=entry.cafile,
        )
        code = run_agent(settings, warn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(EXIT_FAILED if code == TAIL_FAILED else code)
