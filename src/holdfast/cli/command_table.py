"""All commands, as `holdfast --help` lists them. The module of a command is imported when it is used, not before."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer

from holdfast.cli.help import HelpfulGroup, HelpfulTyper


class TableRow(NamedTuple):
    """One command or group of commands.

    module: below `holdfast.cli`; its `register(app)` adds the command. summary: the first sentence of its help.
    """

    module: str
    panel: str
    summary: str


COMMANDS = {
    "demo": TableRow("demo", "Start here", "Train with four nodes on this machine for a minute"),
    "examples": TableRow("examples", "Start here", "List and copy example training scripts"),
    "run": TableRow("job.run", "Run", "Run a job on this machine until it ends"),
    "submit": TableRow("pool.jobs", "Run", "Submit a job to a pool"),
    "calibrate": TableRow("pool.calibrate", "Run", "Measure step times with each number of nodes"),
    "status": TableRow("job.status", "Look", "Show the progress of a job, and its nodes"),
    "events": TableRow("following.events", "Look", "Print the events of a job"),
    "logs": TableRow("history.logs", "Look", "Show the output of workers"),
    "explain": TableRow("history.explain", "Look", "Explain an event, or why the job waits"),
    "jobs": TableRow("pool.jobs", "Look", "Show the jobs of a pool and of this machine"),
    "nodes": TableRow("pool.nodes", "Look", "Show the nodes of a pool"),
    "whatif": TableRow("pool.what_if", "Look", "Forecast a pool's plan after a node or job changes"),
    "scale": TableRow("job.act", "Act", "Start further nodes, or change a pool job's limit"),
    "move": TableRow("job.act", "Act", "Replace nodes by standbys while training goes on"),
    "drain": TableRow("job.act", "Act", "Remove nodes at the end of a step"),
    "undrain": TableRow("job.act", "Act", "Allow drained or quarantined nodes to return"),
    "stop": TableRow("following.stop", "Act", "Save the job, and end it"),
    "checkpoint": TableRow("following.stop", "Act", "Save the job after this step; it continues"),
    "suspend": TableRow("pool.jobs", "Act", "Save a job of a pool, and free its nodes"),
    "resume": TableRow("pool.jobs", "Act", "Continue a suspended job of a pool"),
    "update": TableRow("pool.jobs", "Act", "Change the limits of a job of a pool"),
    "inject": TableRow("job.act", "Test", "Make a node fail, to see the job recover"),
    "schema": TableRow("schema", "Test", "Print the JSON schema of a file"),
    "report": TableRow("history.report", "Afterwards", "Summarize a job: progress, recoveries, their cost"),
    "audit": TableRow("history.audit", "Afterwards", "Prove that each sample counted exactly once"),
    "export": TableRow("history.export", "Afterwards", "Write loss and logged values to a file"),
    "checkpoints": TableRow("history.checkpoints", "Afterwards", "List, verify and export checkpoints"),
    "coordinator": TableRow("job.servers", "Serve", "Run the coordinator of a job"),
    "agent": TableRow("job.servers", "Serve", "Run one node of a job"),
    "pool": TableRow("pool.serve", "Serve", "Run a pool: nodes that several jobs share"),
    "simulate": TableRow("planner.simulate.command", "Plan", "Forecast the cost of failures for a job of any size"),
    "experts": TableRow("planner.experts.plan", "Plan", "Plan on which nodes the experts of a MoE model are"),
    "spares": TableRow("planner.spares.commands", "Plan", "Plan the number and kind of spare nodes"),
}


class Commands(HelpfulGroup):
    """The commands of the table. (Typer brings its own copy of click, so its types have no public names.)"""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        #: None until the command is used. Typer suggests these names for one that does not exist.
        self.commands: dict[str, Any] = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or None for an unknown name. Its module is imported at the first call."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def rows(self, ctx: Any) -> list[tuple[str, str, str]]:
        return [(name, row.panel, row.summary) for name, row in COMMANDS.items()]


def _load(name: str) -> Any:
    """Import the module of a command, and return the command."""
    app = HelpfulTyper(cls=HelpfulGroup, pretty_exceptions_enable=False)
    import_module(f"holdfast.cli.{COMMANDS[name].module}").register(app)
    group: Any = typer.main.get_group(app)
    return group.commands[name]
