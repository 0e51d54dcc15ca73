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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.connection import Server, TokenFile, read_token
from holdfast.cli.options import CONNECTION, JOB, RECOVERY, grouped
from holdfast.cli.output import start_log, warn
from holdfast.cli.spec_options import NODES, AsModule, SpecGroup, job_spec
from holdfast.control.agent.node_agent import run_agent
from holdfast.control.agent.settings import AgentSettings
from holdfast.control.client import CoordinatorClient
from holdfast.control.coordinator.known_checkpoints import intact_checkpoints
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.failure_classes import read_rules
from holdfast.control.launch.modules import with_script
from holdfast.control.launch.settings import check_places, check_script, script_digest
from holdfast.control.programs import check_program
from holdfast.control.registry import JobEntry, check_name, registry_directory
from holdfast.coordination.agent.machine import TAIL_FAILED
from holdfast.coordination.config import CoordinatorConfig
from holdfast.documents import Given, shown
from holdfast.environment import for_workers
from holdfast.errors import EXIT_FAILED, BadInputError, UnreachableError
from holdfast.protocol.names import FAILURE_RATES, RACK_PATTERN

#: between two looks for a coordinator that is not up yet
_PAUSE_S = 0.5
_MOST_PORT = 65535

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
        "--verify-state",
        "--grace",
        "--preflight",
        "--log-dir",
        "--print",
    )
)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where a coordinator listens."""

    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen, port 0 for a free one; a host that others can reach needs a token.",
            rich_help_panel=CONNECTION,
        ),
    ] = "127.0.0.1:0"
    token_file: TokenFile = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve TLS with this certificate.", rich_help_panel=CONNECTION),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key.", rich_help_panel=CONNECTION)
    ] = None

    def place(self) -> tuple[str, int]:
        """Return host and port.

        Raises:
            BadInputError: they are none.
        """
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and re.fullmatch("[0-9]{1,5}", port) and int(port) <= _MOST_PORT):
            raise BadInputError(f"--listen is {shown(self.listen)}: it must be HOST:PORT, such as 127.0.0.1:7000")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What a node is to the others."""

    node_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="This node's name, unique in the job.",
            show_default="the host's, and the pid",
            rich_help_panel=JOB,
        ),
    ] = ""
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address at which the other nodes reach this one.", rich_help_panel=CONNECTION
        ),
    ] = "127.0.0.1"
    rack: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Nodes that may fail together name the same rack.",
            show_default="a rack of its own",
            rich_help_panel=RECOVERY,
        ),
    ] = ""
    zone: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Where its rack is: a lost node's place is taken by one of its rack, else of its zone.",
            show_default="none",
            rich_help_panel=RECOVERY,
        ),
    ] = ""
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait, warm, to take the place of a node that is lost, and train no sooner.",
            rich_help_panel=RECOVERY,
        ),
    ] = False
    failure_rate: Annotated[
        float,
        typer.Option(
            metavar="R",
            help="How often this node fails, the usual one being 1: spot, 10. Experts with few replicas avoid it.",
            rich_help_panel=RECOVERY,
        ),
    ] = 1.0

    def check(self) -> None:
        """Refuse names that cannot be sent.

        Raises:
            BadInputError: naming the option.
        """
        if self.node_name:
            check_name("--node-name", self.node_name)
        for option, name in (("--rack", self.rack), ("--zone", self.zone)):
            if not re.fullmatch(RACK_PATTERN, name):
                raise BadInputError(f"{option} is {name!r}: use letters, digits, dots, dashes, at most 64")
        least, most = FAILURE_RATES
        if not least <= self.failure_rate <= most:
            raise BadInputError(f"--failure-rate is {self.failure_rate:g}: give a number from {least:g} to {most:g}")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("coordinator", rich_help_panel="Serve")(grouped(coordinator))
    settings = {"allow_interspersed_args": False}
    app.command("agent", context_settings=settings, rich_help_panel="Serve")(grouped(agent))


def coordinator(
    spec: Annotated[dict[str, Given], _OF_COORDINATORS],
    listen: ListenOptions,
    store: Annotated[
        str,
        typer.Option(help="Where to keep the job's state: sqlite:PATH or memory:.", rich_help_panel=RECOVERY),
    ] = "memory:",
) -> None:
    """Run a job's coordinator; agents on any machine connect to it. Ends with the job, and with its exit code."""
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
        store=store,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
        registry=registry_directory(os.environ),
        checkpoints=intact_checkpoints(job.checkpoint.dir, warn),
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
    script: Annotated[str, typer.Argument(help="The training script.", metavar="SCRIPT")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments, passed on as they are.")] = None,
    *,
    spec: Annotated[dict[str, Given], _OF_AGENTS],
    node: NodeOptions,
    server: Server,
    as_module: AsModule = False,
) -> None:
    """Run one node of a job: an agent with its workers. Ends with the node's part in the job.

    It may be started before the coordinator, and waits for it.
    """
    start_log("warning")
    given = {**spec, "args": Given(tuple(args or ()), "ARGS")}
    given["module" if as_module else "script"] = Given(script, "SCRIPT")
    described = with_script(job_spec(given), os.getcwd())
    check_script(described.script)
    check_places(described)
    if preflight := described.recovery.preflight:
        check_program("--preflight", preflight)
    node.check()
    entry = server.entry()
    name = job_at(entry, warn)
    server.check_job(name)
    named = job_spec({**given, "name": Given(name, "the job's name")})
    job = with_script(named, os.getcwd()).settled(os.getcwd())
    folder = tempfile.mkdtemp(prefix="holdfast-")
    try:
        settings = AgentSettings(
            spec=job,
            coordinator=entry.url,
            token=entry.token,
            node=node.node_name or f"{socket.gethostname().split('.')[0]}-{os.getpid()}",
            folder=folder,
            digest=script_digest(job.script, job.args),
            advertise=node.advertise,
            cwd=os.getcwd(),
            environment=for_workers(os.environ),
            rack=node.rack,
            zone=node.zone,
            failure_rate=node.failure_rate,
            standby=node.standby,
            tls_ca=entry.tls_ca,
        )
        code = run_agent(settings, warn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(EXIT_FAILED if code == TAIL_FAILED else code)
