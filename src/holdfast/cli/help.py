"""The pages of `--help`: two examples, then one line for each option, the most used ones first.

`--help` shows the options in `COMMON`, `--help-all` shows all of them. docs/commands.md describes them in full.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from holdfast.errors import EXIT_BAD_INPUT

#: columns of a page
COLUMNS = 80
#: columns of the names of options and commands
_NAMES = 28

#: the options that `--help` shows, by command; a command that is missing here shows all of its own
COMMON: dict[str, tuple[str, ...]] = {
    "run": (
        *("--nodes", "--workers-per-node", "--standbys", "--checkpoint-dir", "--checkpoint-every", "--time-limit"),
        *("--events", "--log-dir", "--metrics-file", "--set", "--verbose", "--allow-faults"),
    ),
    "submit": (
        *("--name", "--nodes", "--workers-per-node", "--checkpoint-dir", "--checkpoint-every", "--standbys", "--set"),
        *("--follow", "--address"),
    ),
    "coordinator": ("--nodes", "--listen", "--store", "--checkpoint-dir", "--events", "--token-file", "--tls-cert"),
    "agent": (
        *("--address", "--node-name", "--advertise", "--rack", "--standby", "--workers-per-node", "--checkpoint-dir"),
        "--token-file",
    ),
    "pool": ("--local", "--listen", "--store", "--policy", "--reserve", "--token-file"),
    "experts plan": ("--loads", "--expert-slots", "--nodes", "--fault-threshold", "--expert-placement", "--plot"),
    "simulate": ("--nodes", "--mtbf", "--mttr", "--standbys", "--hours", "--scale", "--availability"),
    "spares fit": ("--cluster", "--nodes", "--map", "--plot", "--json"),
}
#: how a running job is found: in --help-all alone, if a command has other options
_CONNECTION = {"--address", "--job", "--token-file", "--tls-ca"}

EXAMPLES: dict[str, tuple[str, str]] = {
    "demo": ("holdfast demo", "holdfast demo --steps 100 --out demo"),
    "examples list": ("holdfast examples list", "holdfast examples list --json"),
    "examples copy": ("holdfast examples copy nanogpt", "holdfast examples copy moe_gpt --to scripts"),
    "run": (
        "holdfast run --nodes 4 train.py --steps 1000",
        "holdfast run --nodes 4 --standbys 1 --checkpoint-dir ckpt train.py",
    ),
    "submit": ("holdfast submit --nodes 1:4 train.py", "holdfast submit --follow job.toml"),
    "calibrate": (
        "holdfast calibrate job.toml --nodes 1:4 -o measured.toml",
        "holdfast calibrate job.toml --nodes 2:8 --patience 120 -o measured.toml",
    ),
    "status": ("holdfast status", "holdfast status --wide -j gpt"),
    "events": ("holdfast events --follow", "holdfast events events.jsonl --json"),
    "logs": ("holdfast logs --follow --node node-1", "holdfast logs log-dir"),
    "explain": ("holdfast explain", "holdfast explain 33 events.jsonl"),
    "jobs": ("holdfast jobs", "holdfast jobs --json"),
    "nodes": ("holdfast nodes", "holdfast nodes --json"),
    "whatif": ("holdfast whatif lose node-1", "holdfast whatif submit job.toml"),
    "scale": ("holdfast scale +1", "holdfast scale 8"),
    "move": ("holdfast move node-2", "holdfast move node-2 --to standby-0 --dry-run"),
    "drain": ("holdfast drain node-2", "holdfast drain --rolling"),
    "undrain": ("holdfast undrain node-2", "holdfast undrain node-2 node-3"),
    "stop": ("holdfast stop", "holdfast stop --now"),
    "checkpoint": ("holdfast checkpoint", "holdfast checkpoint --no-wait -j gpt"),
    "suspend": ("holdfast suspend -j gpt", "holdfast suspend -j gpt --force"),
    "resume": ("holdfast resume -j gpt", "holdfast resume -j gpt --json"),
    "update": ("holdfast update -j gpt --weight 2", "holdfast update -j gpt --min-nodes 2 --max-nodes 8"),
    "report": ("holdfast report", "holdfast report events.jsonl --plot job.png"),
    "audit": ("holdfast audit events.jsonl", "holdfast audit events.jsonl --json"),
    "export": (
        "holdfast export events.jsonl --format csv --output curves.csv",
        "holdfast export --follow --format tensorboard --output tb",
    ),
    "checkpoints list": ("holdfast checkpoints list ckpt", "holdfast checkpoints list s3://bucket/ckpt --json"),
    "checkpoints verify": ("holdfast checkpoints verify ckpt", "holdfast checkpoints verify ckpt --step 500"),
    "checkpoints export": (
        "holdfast checkpoints export ckpt -o model.safetensors --model-only",
        "holdfast checkpoints export ckpt -o state.pt --format torch --step 500",
    ),
    "coordinator": (
        "holdfast coordinator --listen 10.0.0.1:7000 --store sqlite:job.db --nodes 4",
        "holdfast coordinator --nodes 2:8 --checkpoint-dir ckpt --store sqlite:job.db",
    ),
    "agent": (
        "holdfast agent --address http://10.0.0.1:7000 -- train.py --steps 500",
        "holdfast agent --address http://10.0.0.1:7000 --standby -- train.py",
    ),
    "pool": ("holdfast pool --local 4", "holdfast pool --listen 10.0.0.1:7000 --store sqlite:pool.db"),
    "inject": ("holdfast inject kill node-1", "holdfast inject slow node-2 --step 40 --times 3"),
    "schema": ("holdfast schema job", "holdfast schema events"),
    "experts plan": (
        "holdfast experts plan --loads loads.csv --expert-slots 6 --nodes 4",
        "holdfast experts plan --loads loads.csv --expert-slots 6,6,4 --pareto",
    ),
    "simulate": ("holdfast simulate --nodes 1024 --mtbf 400d", "holdfast simulate --scale"),
    "spares plan": ("holdfast spares plan catalina.toml", "holdfast spares plan catalina.toml --plot plots"),
    "spares map": ("holdfast spares map catalina.toml", "holdfast spares map catalina.toml --plot plots"),
    "spares validate": ("holdfast spares validate catalina.toml", "holdfast spares validate catalina.toml --seed 7"),
    "spares fit": (
        "holdfast spares fit failures.csv --nodes 256",
        "holdfast spares fit failures.csv --cluster catalina.toml --plot plots",
    ),
}


class HelpfulCommand(TyperCommand):
    """A command with these pages."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the short page."""
        formatter.write(command_page(self, ctx, everything=False))


class HelpfulGroup(TyperGroup):
    """A group of commands, listed by panel with one line each."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line.

        Without any, print the list of commands on stderr and exit as for bad input.
        """
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(EXIT_BAD_INPUT)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        formatter.write("\n".join(_group_lines(self, ctx)) + "\n")

    def rows(self, ctx: Any) -> list[tuple[str, str, str]]:
        """Return name, panel and help of each command."""
        found: list[tuple[str, Any]] = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, "Commands", inspect.cleandoc(command.help or "")) for name, command in found]


class HelpfulTyper(typer.Typer):
    """A Typer application with these pages for its commands."""

    def command(self, name: str | None = None, **settings: Any) -> Any:
        """Return a decorator that registers a command, and gives it the option --help-all."""
        register = super().command(name, cls=HelpfulCommand, **settings)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            """Register the function with --help-all, and return it unchanged."""
            register(_with_help_all(function))
            return function

        return decorate


def _with_help_all(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the parameters of a command and one for --help-all, which it does not pass on."""
    signature = inspect.signature(function, eval_str=True)
    option = typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options.")
    more = inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )

    @functools.wraps(function)
    def command(*, help_all: bool = False, **values: Any) -> Any:
        return function(**values)

    parameters = [*signature.parameters.values(), more]
    command.__dict__["__signature__"] = signature.replace(parameters=parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _show_all(ctx: typer.Context, asked: bool) -> None:
    """Print the long page of a command and exit, if --help-all is given."""
    if asked:
        typer.echo(command_page(ctx.command, ctx, everything=True), nl=False)
        raise typer.Exit


def command_page(command: Any, ctx: Any, *, everything: bool) -> str:
    """Return the page of a command; `everything`: with all options and its whole description."""
    program = ctx.find_root().command_path
    name = ctx.command_path.removeprefix(program).strip()
    return "\n".join(_command_lines(command, ctx, name, everything=everything)) + "\n"


def _command_lines(command: Any, ctx: Any, name: str, *, everything: bool) -> Iterator[str]:
    """Yield the lines of a command's page: usage, description, examples, arguments and options.

    With `everything`: all paragraphs and options, by panel, and long lists of values. Else the first paragraph, the
    most common options, and how many more there are.
    """
    yield from textwrap.wrap(_usage(command, ctx), COLUMNS, subsequent_indent=" " * 9, break_on_hyphens=False)
    paragraphs = inspect.cleandoc(command.help or "").replace("\\[", "[").split("\n\n")
    for paragraph in paragraphs if everything else paragraphs[:1]:
        yield ""
        yield textwrap.fill(paragraph, COLUMNS)
    if examples := EXAMPLES.get(name):
        yield "\nExamples:"
        yield from (f"  {example}" for example in examples)
    options = [param for param in command.get_params(ctx) if param.param_type_name == "option" and not param.hidden]
    arguments = [
        param for param in command.params if param.param_type_name == "argument" and getattr(param, "help", "")
    ]
    if arguments:
        yield "\nArguments:"
        for argument in arguments:
            label = f"  {_argument_name(argument)}".ljust(_NAMES - 1) + " "
            lines = argument.help.splitlines()
            indent = " " * (_NAMES if len(lines) == 1 else _NAMES + 2)
            for line in lines:
                yield textwrap.fill(line, COLUMNS, initial_indent=label, subsequent_indent=indent)
                label = " " * _NAMES
    shown = options if everything else list(_common(name, options))
    panels = dict.fromkeys(getattr(option, "rich_help_panel", None) or "Options" for option in shown)
    if not everything:
        panels = {"Options": None}
    for panel in panels:
        yield f"\n{panel}:"
        for option in shown:
            if not everything or (getattr(option, "rich_help_panel", None) or "Options") == panel:
                yield _option_line(option, ctx)
                if everything and (values := _hidden_values(option, ctx)):
                    yield f"{' ' * _NAMES}{values}"
    if not everything and (more := len({option.name for option in options} - {option.name for option in shown}) - 1):
        yield f"\nMore options ({more}): holdfast {name} --help-all"


def _common(name: str, options: Iterable[Any]) -> Iterator[Any]:
    """Yield the options for the short page: --help, and those in `COMMON` for this command.

    If `COMMON` has no list for it, all but those of the connection.
    """
    always = {"--help"}
    wanted = COMMON.get(name)
    for option in options:
        names = set(option.opts)
        if names & always or (names & set(wanted) if wanted is not None else not names & {*_CONNECTION, "--help-all"}):
            yield option


def _group_lines(group: Any, ctx: Any) -> Iterator[str]:
    """Yield the lines of a group's page: usage, description, its commands by panel, and its options."""
    yield f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]..."
    yield ""
    yield inspect.cleandoc(group.help or "").split("\n\n")[0]
    panels: dict[str, list[str]] = {}
    for name, panel, text in group.rows(ctx):
        panels.setdefault(panel, []).append(_line(name, text))
    for title, lines in panels.items():
        yield f"\n{title}:"
        yield from lines
    yield "\nOptions:"
    for option in group.get_params(ctx):
        if option.param_type_name == "option" and not option.hidden:
            yield _line(_names(option, ctx), (option.help or "").split(",")[0])


def _usage(command: Any, ctx: Any) -> str:
    """Return the form of a command line, such as `Usage: holdfast drain [OPTIONS] [NODE]...`."""
    words = [ctx.command_path, "[OPTIONS]"]
    for argument in command.params:
        if argument.param_type_name == "argument":
            name = _argument_name(argument)
            words.append((name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else ""))
    return f"Usage: {' '.join(words)}"


def _argument_name(argument: Any) -> str:
    return (argument.metavar or argument.name.upper()).strip("[].")


def _names(option: Any, ctx: Any) -> str:
    """Return an option's names and its value, such as `--nodes N|MIN:MAX`. A flag has no value.

    `CHOICE` stands for a list of values that does not fit into the line.
    """
    names = ", ".join(sorted({*option.opts, *option.secondary_opts}, key=len))
    if option.is_flag:
        return names
    return f"{names} {'CHOICE' if _hidden_values(option, ctx) else _value(option, ctx)}"


def _value(option: Any, ctx: Any) -> str:
    """Return the metavar of an option, or the type of its value in capitals, or its choices separated by `|`."""
    record = option.get_help_record(ctx)
    value = option.metavar or (record[0].split()[-1].strip("<>[]") if record else "")
    return value if option.metavar or "|" in value else value.upper()


def _hidden_values(option: Any, ctx: Any) -> str:
    """Return the values of an option, separated by commas, if its line on the page has no room for them; else ""."""
    if option.is_flag or "|" not in (value := _value(option, ctx)):
        return ""
    length = len(", ".join({*option.opts, *option.secondary_opts})) + 1 + len(value)
    text = _first_sentence(option.help or "")
    fits = max(length, _NAMES - 4) + len("  ") * 2 + len(text) <= COLUMNS
    return "" if fits else value.replace("|", ", ")


def _option_line(option: Any, ctx: Any) -> str:
    """Return the line for an option: its names, value and help, and its default if there is room for it."""
    default = option.show_default if isinstance(option.show_default, str) else ""
    if option.show_default is True and not option.is_flag and option.default not in (None, "", 0):
        default = str(option.default)
    line = _line(_names(option, ctx), option.help or "")
    with_default = f"{line} (default: {default})"
    return with_default if default and len(with_default) <= COLUMNS else line


def _first_sentence(text: str) -> str:
    """Return a text up to the end of its first sentence, without the full stop."""
    line = " ".join(text.replace("\\[", "[").split())
    end = line.find(". ")
    return (line if end < 0 else line[:end]).removesuffix(".")


def _line(name: str, text: str) -> str:
    """Return one line of a list, at most 80 columns if the texts are as short as they should be."""
    gap = " " * max(_NAMES - 2 - len(name), 2)
    return f"  {name}{gap}{_first_sentence(text)}"
