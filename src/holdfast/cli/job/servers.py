"""`holdfast coordinator` and `holdfast agent`: a job's pieces on several machines."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.cli.connection import Server, read_token
from holdfast.cli.following.progress import PlainProgress
from holdfast.cli.options import RECOVERY, warn_of_misplaced, with_option_groups
from holdfast.cli.output import called_in_a_thread, lasting_output, start_log, warn
from holdfast.cli.pool.serve import run_node
from holdfast.cli.server_options import ListenOptions, NodeOptions
from holdfast.cli.spec_options import NODES, AsModule, SpecGroup, job_spec
from holdfast.control.agent.node_agent import run_agent
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.client import CoordinatorClient
from holdfast.control.coordinator.known_checkpoints import load_usable_checkpoints
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.failure_classes import read_rules
from holdfast.control.launch.script_modules import with_script
from holdfast.control.launch.settings import check_places, check_script, script_digest
from holdfast.control.owned_folders import owned_folder
from holdfast.control.programs import check_program
from holdfast.control.registry import JobEntry, find_pool, registry_directory
from holdfast.coordination.agent.machine import TAIL_FAILED
from holdfast.coordination.config import CoordinatorConfig
from holdfast.documents import Given
from holdfast.environment import for_workers
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED, BadInputError, UnreachableError
from holdfast.protocol.job_spec import JobSpec
from holdfast.storage import is_url

#: between two looks for a coordinator that is not up yet
_PAUSE_S = 0.5

_OF_COORDINATORS = SpecGroup(
    (
        "--name",
        "--nodes",
        "--time-limit",
        "--checkpoint-dir",
        "--on-node-failure",
        "--stragglers",
        "--on-process-failure",
        "--fault-threshold",
        "--join-window",
        "--max-restarts",
        "--max-skipped-steps",
        "--failure-classes",
        "--expert-placement",
        "--rebalance-every",
        "--events",
        "--alert",
        "--flop-per-sample",
        "--peak-flop-per-s",
        "--allow-faults",
    ),
    defaults={NODES: 1},
)
_OF_AGENTS = SpecGroup(
    (
        "--workers-per-node",
        "--checkpoint-dir",
        "--checkpoint-every",
        "--checkpoint-rate",
        "--snapshot-every",
        "--snapshot-dir",
        "--expert-slots",
        "--emulate-compute",
        "--verify-state",
        "--grace",
        "--preflight",
        "--log-dir",
        "--print",
    )
)

#: keys of which a pool's node has its own
_OF_POOLED_NODES = ("workers_per_node", "recovery.grace", "output.log_dir")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("coordinator")(with_option_groups(coordinator))
    settings = {"allow_interspersed_args": False}
    app.command("agent", context_settings=settings)(with_option_groups(agent))


def coordinator(
    spec: Annotated[dict[str, Given], _OF_COORDINATORS],
    listen: ListenOptions,
    store: Annotated[
        str,
        typer.Option(
            help="Store: sqlite:PATH, etcd:http://HOST:PORT, memory:.",
            show_default="in the checkpoint directory if that is a folder, else memory:",
            rich_help_panel=RECOVERY,
        ),
    ] = "",
) -> None:
    """Run the coordinator of a job. Agents on any machine connect to it. It ends with the exit code of the job."""
    start_log("info")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    job = job_spec(spec)
    check_places(job)
    host, port = listen.place()
    rules = read_rules(job.recovery.failure_classes)
    settings = ServerSettings(
        config=CoordinatorConfig(spec=job.settled(os.getcwd()), rules=rules),
        host=host,
        port=port,
        token=read_token(listen.token_file),
        store=store or kept_store(job) or "memory:",
        kept=not store,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        registry=registry_directory(os.environ),
        checkpoints=load_usable_checkpoints(job.checkpoint.dir, warn),
    )
    from holdfast.control.coordinator.server import run_coordinator  # 0.5 s of imports that no other command needs

    nodes = settings.config.spec.nodes_to_begin

    def on_ready(entry: JobEntry) -> None:
        """Print how many nodes the job waits for, and the command that starts one."""
        print_line(f"waiting for {nodes} node{'s' * (nodes > 1)}: holdfast agent --address {entry.url} -- SCRIPT")

    with lasting_output() as print_now, called_in_a_thread(print_now) as print_line:
        progress = PlainProgress(print_line)
        code = run_coordinator(settings, on_ready=on_ready, on_event=progress)
        if code in (EXIT_FAILED, EXIT_BAD_INPUT) and progress.failure:
            warn(f"holdfast: {progress.failure}")
    raise typer.Exit(code)


def kept_store(job: JobSpec) -> str:
    """Return the store next to a job's checkpoints, with its folder made; "" if they lie in no folder of this machine.

    Raises:
        BadInputError: the folder cannot be made.
    """
    if not job.checkpoint.dir or is_url(job.checkpoint.dir):
        return ""
    folder = Path(job.checkpoint.dir).absolute() / f"holdfast-{quote(job.name, safe='')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"the folder {folder} cannot be made: {error.strerror}; give --store") from None
    return f"sqlite:{folder / 'store.sqlite'}"


def job_at(entry: JobEntry, print_status: Callable[[str], None]) -> str:
    """Return the name of the job at an address. Wait for a coordinator that is not up yet, and report each new reason.

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
                    print_status(f"holdfast: {told}; waiting for it")
                time.sleep(_PAUSE_S)


def agent(
    script: Annotated[
        str | None,
        typer.Argument(help="The training script.", metavar="[SCRIPT]", show_default="none: a node of a pool"),
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")] = None,
    *,
    spec: Annotated[dict[str, Given], _OF_AGENTS],
    node: NodeOptions,
    server: Server,
    as_module: AsModule = False,
) -> None:
    """Run one node of a job. It ends with the node's part in the job.

    Without SCRIPT it is a node of a pool, which gives it to one job after another.

    An agent that starts before its coordinator or pool waits for it.
    """
    start_log("info")
    if script is None:
        raise typer.Exit(_node_of_pool(spec, node, server))
    given = {**spec, "args": Given(tuple(args or ()), "ARGS")}
    given["module" if as_module else "script"] = Given(script, "SCRIPT")
    described = with_script(job_spec(given), os.getcwd())
    check_script(described.script)
    check_places(described)
    warn_of_misplaced(agent, "agent", described.script, args or ())
    if preflight := described.recovery.preflight:
        check_program("--preflight", preflight)
    node.check()
    entry = server.entry()
    name = job_at(entry, warn)
    server.check_job(name)
    named = job_spec({**given, "name": Given(name, "the job's name")})
    job = with_script(named, os.getcwd()).settled(os.getcwd())
    node_name = node.node_name or f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
    with owned_folder("node", len(f"{node_name}.sock")) as folder:
        settings = AgentSettings(
            spec=job,
            coordinator=entry.url,
            token=entry.token,
            node=node_name,
            folder=folder,
            digest=script_digest(job.script, job.args),
            advertise=node.advertised(entry.url),
            cwd=os.getcwd(),
            environment=for_workers(os.environ),
            rack=node.rack,
            zone=node.zone,
            failure_rate=node.failure_rate,
            standby=node.standby,
            tls_ca=entry.tls_ca,
        )
        code = run_agent(settings, warn)
    raise typer.Exit(EXIT_FAILED if code == TAIL_FAILED else code)


def _node_of_pool(spec: dict[str, Given], node: NodeOptions, server: Server) -> int:
    """Run a node of a pool. Return the exit code.

    Raises:
        BadInputError: an option is not for pools, or no pool is found.
    """
    for key, value in spec.items():
        if key not in _OF_POOLED_NODES:
            raise BadInputError(f"{value.name} belongs to a job: give SCRIPT, or say it of the job (holdfast submit)")
    entry = find_pool(
        registry_directory(os.environ), server.address, read_token(server.token_file), tls_ca=server.tls_ca
    )
    if entry is None:
        raise BadInputError("SCRIPT is missing, and no pool runs on this machine: give either, or --address of a pool")
    told = job_spec(spec)
    workers = told.workers_per_node if "workers_per_node" in spec else 0
    return run_node(entry, node, workers, told.recovery.grace, told.output.log_dir)
