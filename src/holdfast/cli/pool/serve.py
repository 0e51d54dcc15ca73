"""`holdfast pool`: several jobs on the same nodes; `holdfast agent` without a script: one of these nodes."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.cli.connection import read_token
from holdfast.cli.options import JOB, OUTPUT, RECOVERY, with_option_groups
from holdfast.cli.output import print_line, start_log, warn
from holdfast.cli.server_options import ListenOptions, NodeOptions
from holdfast.control.owned_folders import OWN_SOCKET_NAME, owned_folder
from holdfast.control.pool.settings import PoolSettings, check_policy, default_folder
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.registry import JobEntry, check_name, registry_directory
from holdfast.environment import for_workers
from holdfast.errors import BadInputError

_MOST_HERE = 256
#: the longest number of a grant that a folder's name is expected to hold
_MOST_GRANT = 10**9


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("pool")(with_option_groups(pool))


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What a pool is."""

    name: Annotated[str, typer.Option(metavar="NAME", help="The pool's name.", rich_help_panel=JOB)] = "pool"
    policy: Annotated[
        str,
        typer.Option(
            metavar="equal|weighted|priority|sized|waf",
            help="How the jobs share the nodes.",
            rich_help_panel=JOB,
        ),
    ] = "equal"
    reserve: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Warm nodes that wait for jobs to lose one. auto, with --policy waf: as many as are worth more there "
            "than in jobs.",
            rich_help_panel=RECOVERY,
        ),
    ] = "0"
    allow_starving: Annotated[
        bool,
        typer.Option(
            "--allow-starving",
            help="With waf: jobs with checkpoints may get no node. Their nodes do more for others.",
            rich_help_panel=JOB,
        ),
    ] = False
    local: Annotated[int, typer.Option(metavar="N", help="Also run N nodes on this machine.", rich_help_panel=JOB)] = 0
    store: Annotated[
        str,
        typer.Option(
            help="Store: sqlite:PATH, etcd:http://HOST:PORT, memory:.",
            rich_help_panel=RECOVERY,
        ),
    ] = "memory:"
    journals: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for events of the pool and its jobs.",
            show_default="beside a SQLite store",
            rich_help_panel=OUTPUT,
        ),
    ] = None

    @property
    def _reserve(self) -> int | Literal["auto"]:
        """Return the number of nodes to keep in reserve, or "auto".

        Raises:
            BadInputError: it is neither, or "auto" is given for another policy than waf.
        """
        if self.reserve == "auto":
            if self.policy != "waf":
                raise BadInputError(
                    f"--reserve auto is for --policy waf, which computes the value of a node, and the policy is "
                    f"{self.policy}: give a number of nodes"
                )
            return "auto"
        if not self.reserve.isdecimal() or int(self.reserve) > _MOST_HERE:
            raise BadInputError(f"--reserve is {self.reserve}: give a number from 0 to {_MOST_HERE}, or auto")
        return int(self.reserve)

    def settings(self, listen: ListenOptions) -> PoolSettings:
        """Return the settings of the pool.

        Raises:
            BadInputError: naming the option.
        """
        check_policy(self.policy)
        if self.allow_starving and self.policy != "waf":
            raise BadInputError(f"--allow-starving is for --policy waf, and the policy is {self.policy}: leave it out")
        if not 0 <= self.local <= _MOST_HERE:
            raise BadInputError(f"--local is {self.local}: give a number from 0 to {_MOST_HERE}")
        host, port = listen.place()
        return PoolSettings(
            name=self.name,
            policy=self.policy,
            allow_starving=self.allow_starving,
            reserve=self._reserve,
            expected=self.local,
            host=host,
            port=port,
            token=read_token(listen.token_file),
            store=self.store,
            tls_cert=listen.tls_cert,
            tls_key=listen.tls_key,
            registry=registry_directory(os.environ),
            folder=self.journals or default_folder(self.store),
        )


def pool(*, listen: ListenOptions, options: PoolOptions) -> None:
    """Run a pool: nodes that several jobs share. It ends at Ctrl-C.

    Jobs continue while no pool runs. The next one with the same --store manages them again.
    """
    start_log("info")
    for noisy in ("uvicorn", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    settings = options.settings(listen)
    if options.local:
        from holdfast.control.pool.local_pool import run_local_pool

        raise typer.Exit(run_local_pool(settings, options.local, for_workers(os.environ), print_line))
    from holdfast.control.pool.pool_server import run_pool  # 0.5 s of imports that no other command needs

    raise typer.Exit(run_pool(settings))


def run_node(entry: JobEntry, node: NodeOptions, workers: int, grace_s: float, log_dir: str) -> int:
    """Run a node of the pool at `entry.url` until it is ordered to end. Return the exit code.

    Args:
        workers: the most workers per node that a job may have here; 0 for any number.
        grace_s: seconds that the node stays after a signal to end, so that its job can drain it.
        log_dir: folder for the workers' output; "" for none.

    Raises:
        BadInputError: an option cannot be used, such as --standby.
    """
    from holdfast.control.pool_node.pool_agent import run_pool_agent

    node.check()
    if node.standby:
        raise BadInputError("--standby is for nodes of a job: a pool chooses its reserve itself (--reserve)")
    name = node.node_name or f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
    check_name("--node-name", name)
    longest = len(f"{_MOST_GRANT}/") + max(len(f"{name}.sock"), OWN_SOCKET_NAME)
    with owned_folder("node", longest) as folder:
        settings = PoolNodeSettings(
            pool=entry.url,
            token=entry.token,
            node=name,
            folder=folder,
            advertise=node.advertised(entry.url),
            rack=node.rack,
            zone=node.zone,
            failure_rate=node.failure_rate,
            tls_ca=entry.tls_ca,
            environment=for_workers(os.environ),
            log_folder=os.path.abspath(log_dir) if log_dir else "",
            workers=workers,
            grace_s=grace_s,
            passing=not node.node_name,
        )
        return run_pool_agent(settings, warn)
