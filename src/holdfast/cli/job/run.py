"""`holdfast run`: a whole job on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.following.kept_journals import journal_folder, kept_journal, new_journal
from holdfast.cli.following.show import OnEvent, Shown, filter_this_run, run_shown, write_metrics_to
from holdfast.cli.job.availability import TraceOptions, run_through
from holdfast.cli.options import CONNECTION, JOB, OUTPUT, RECOVERY, warn_of_misplaced, with_option_groups
from holdfast.cli.output import AsJson, start_log, warn
from holdfast.cli.spec_options import AsModule, SpecGroup, collect_job, job_spec, without_effect
from holdfast.control.launch.launcher import launch
from holdfast.control.launch.script_modules import with_script
from holdfast.control.launch.settings import LaunchSettings
from holdfast.control.link.forking import PRELOAD
from holdfast.control.registry import registry_directory
from holdfast.documents import Given
from holdfast.environment import for_workers, log_level
from holdfast.errors import EXIT_BAD_INPUT, EXIT_FAILED

_LOG = "warning"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a job runs on this machine. The job itself is described by its keys."""

    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Set any key of job.toml, such as checkpoint.every=50.",
            show_default=False,
            rich_help_panel=JOB,
        ),
    ] = None
    store: Annotated[
        str,
        typer.Option(
            help="Store: sqlite:PATH, etcd:http://HOST:PORT, memory:.",
            show_default="in the job's folder",
            rich_help_panel=RECOVERY,
        ),
    ] = ""
    port: Annotated[int, typer.Option(help="The coordinator's port; 0: a free one.", rich_help_panel=CONNECTION)] = 0
    job_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the job's files.",
            show_default="a temporary folder",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    preload: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME,...",
            help="Modules to import once, before workers are forked.",
            show_default="torch and more",
            rich_help_panel=JOB,
        ),
    ] = ",".join(PRELOAD)
    zygote: Annotated[
        str,
        typer.Option(
            metavar="SOCKET",
            help="Fork workers from a running zygote.",
            show_default="one of the job's own",
            rich_help_panel=JOB,
        ),
    ] = ""
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also in a terminal.", rich_help_panel=OUTPUT)] = (
        False
    )
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="Print details: FLOP, memory, expert moves.", rich_help_panel=OUTPUT),
    ] = False

    def settings(self, given: Mapping[str, Given]) -> LaunchSettings:
        """Return the launcher's settings for a job with these values, by key.

        Raises:
            BadInputError: a value breaks its key's rule.
        """
        return LaunchSettings(
            spec=with_script(job_spec(given), os.getcwd()),
            names={key: value.name for key, value in given.items()},
            store=self.store,
            port=self.port,
            job_dir=self.job_dir,
            registry=registry_directory(os.environ),
            environment=for_workers(os.environ),
            preload=tuple(name for name in self.preload.split(",") if name),
            zygote=self.zygote,
            log=log_level(os.environ, _LOG),
        )


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    # What follows SCRIPT belongs to the script, options included.
    settings = {"allow_interspersed_args": False}
    app.command("run", context_settings=settings)(with_option_groups(run))


def run(
    script: Annotated[
        str,
        typer.Argument(help="A script, a job file, or with -m a module.", metavar="SCRIPT|JOB.toml|MOD"),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="The script's arguments, passed on as they are.")] = None,
    *,
    spec: Annotated[dict[str, Given], SpecGroup()],
    options: RunOptions,
    trace: TraceOptions,
    as_module: AsModule = False,
    as_json: AsJson = False,
) -> None:
    """Run a job on this machine until it ends.

    Precedence: command-line options, then --set, then job.toml.

    With --availability, nodes start and are killed as in the trace.

    Exit codes: 0 the job is done, 1 it failed, 2 bad input, 75 it was stopped and can be resumed, 130 Ctrl-C.
    """
    start_log(_LOG)
    given = collect_job(script, args or (), options.set or (), spec, as_module=as_module)
    shown = Shown(plain=options.plain, as_json=as_json, verbose=options.verbose)
    if trace.availability is not None:
        raise typer.Exit(run_through(trace, given, options.settings, shown))
    trace.check_unused()
    prepared = options.settings(given)
    journal = new_journal(journal_folder(os.environ), prepared.spec.settled(os.getcwd()).name)
    warn_of_misplaced(run, "run", prepared.spec.script, args or ())
    for warning in without_effect(given, prepared.spec):
        warn(f"holdfast: {warning}")

    async def job(settings: LaunchSettings, on_event: OnEvent) -> int:
        """Run the job; write its metrics file and kept journal, and show the events of this run only."""
        settings.check()
        new = filter_this_run(settings.spec.output.events, on_event)
        with write_metrics_to(settings.spec.output.metrics_file, new) as told, kept_journal(journal, told) as kept:
            return await launch(settings, kept, warn)

    code = run_shown(prepared, job, shown)
    if code in (EXIT_FAILED, EXIT_BAD_INPUT):
        file = prepared.spec.output.events or journal
        if os.path.exists(file):
            warn(f"holdfast: the reason, and the attempts: holdfast explain {file}")
    raise typer.Exit(code)
