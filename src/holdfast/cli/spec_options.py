"""The options that set a job's keys: one line each. What they mean, their rules and defaults are the keys' own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from holdfast.cli.options import EXPERIMENTS, EXPERTS, JOB, OUTPUT, RECOVERY
from holdfast.documents import Given, Key, build_struct, check_known, keys_of, read_toml
from holdfast.errors import BadInputError
from holdfast.protocol.job_spec import JobSpec

NODES = "max_nodes"

AsModule = Annotated[
    bool,
    typer.Option("-m", "--module", help="Run a module, as `python -m` does.", rich_help_panel=JOB),
]


@dataclass(frozen=True, slots=True)
class SpecOption:
    """An option: the key that it sets, how its value is written, and where help shows it."""

    name: str
    key: str
    metavar: str
    panel: str


SPEC_OPTIONS = (
    SpecOption("--name", "name", "NAME", JOB),
    SpecOption("--nodes", NODES, "N|MIN:MAX", JOB),
    SpecOption("--workers-per-node", "workers_per_node", "N", JOB),
    SpecOption("--time-limit", "time_limit", "TIME", JOB),
    SpecOption("--checkpoint-dir", "checkpoint.dir", "DIR", RECOVERY),
    SpecOption("--checkpoint-every", "checkpoint.every", "STEPS|auto", RECOVERY),
    SpecOption("--checkpoint-rate", "checkpoint.rate", "SIZE", RECOVERY),
    SpecOption("--snapshot-every", "checkpoint.snapshot_every", "STEPS", RECOVERY),
    SpecOption("--snapshot-dir", "checkpoint.snapshot_dir", "DIR", RECOVERY),
    SpecOption("--on-node-failure", "recovery.on_node_failure", "auto|standby|shrink|wait|restart-all", RECOVERY),
    SpecOption("--standbys", "recovery.standbys", "N", RECOVERY),
    SpecOption("--stragglers", "recovery.stragglers", "ask|move|off", RECOVERY),
    SpecOption("--on-process-failure", "recovery.on_process_failure", "auto|shrink|hold", RECOVERY),
    SpecOption("--fault-threshold", "recovery.fault_threshold", "F", RECOVERY),
    SpecOption("--join-window", "recovery.join_window", "TIME", RECOVERY),
    SpecOption("--grace", "recovery.grace", "TIME", RECOVERY),
    SpecOption("--max-restarts", "recovery.max_restarts", "N", RECOVERY),
    SpecOption("--max-skipped-steps", "recovery.max_skipped_steps", "N", RECOVERY),
    SpecOption("--preflight", "recovery.preflight", "COMMAND", RECOVERY),
    SpecOption("--failure-classes", "recovery.failure_classes", "FILE", RECOVERY),
    SpecOption("--expert-slots", "experts.slots", "N", EXPERTS),
    SpecOption("--expert-placement", "experts.placement", "best|mro|spread|compact", EXPERTS),
    SpecOption("--rebalance-every", "experts.rebalance_every", "STEPS", EXPERTS),
    SpecOption("--events", "output.events", "FILE", OUTPUT),
    SpecOption("--metrics-file", "output.metrics_file", "FILE|DIR", OUTPUT),
    SpecOption("--log-dir", "output.log_dir", "DIR", OUTPUT),
    SpecOption("--print", "output.print", "all|rank0|failed", OUTPUT),
    SpecOption("--alert", "output.alert", "PROGRAM|URL", OUTPUT),
    SpecOption("--flop-per-sample", "output.flop_per_sample", "FLOP", OUTPUT),
    SpecOption("--peak-flop-per-s", "output.peak_flop_per_s", "FLOP/S", OUTPUT),
    SpecOption("--static-experts", "experiments.static_experts", "", EXPERIMENTS),
    SpecOption("--ep-size", "experiments.ep_size", "N", EXPERIMENTS),
    SpecOption("--emulate-compute", "experiments.emulate_compute", "S/token|S/micro-batch", EXPERIMENTS),
    SpecOption("--verify-state", "experiments.verify_state", "EVERY", EXPERIMENTS),
    SpecOption("--allow-faults", "experiments.allow_faults", "", EXPERIMENTS),
)


@dataclass(frozen=True, slots=True)
class SpecGroup:
    """A group of some of these options. Its value is the given options, by key."""

    names: tuple[str, ...] = tuple(option.name for option in SPEC_OPTIONS)
    #: defaults of this command, by key, in place of the keys' own
    defaults: Mapping[str, object] | None = None

    def parameters(self) -> list[inspect.Parameter]:
        """Return one parameter for each option."""
        keys = keys_of(JobSpec)
        return [
            inspect.Parameter(
                _python_name(option),
                inspect.Parameter.KEYWORD_ONLY,
                default=False if keys[option.key].is_flag else None,
                annotation=self._annotation(option, keys[option.key]),
            )
            for option in self._options()
        ]

    def collect(self, values: Mapping[str, Any]) -> dict[str, Given]:
        """Return the given values by key, over this command's defaults. They are not checked yet.

        Args:
            values: of all options of the group, by parameter name; None or False if not given.
        """
        given = {key: Given(value, key) for key, value in (self.defaults or {}).items()}
        for option in self._options():
            value = values[_python_name(option)]
            if value is True:
                given[option.key] = Given(True, option.name)
            elif isinstance(value, str):
                given |= (
                    _parse_nodes(value) if option.key == NODES else {option.key: Given(value, option.name, text=True)}
                )
        return given

    def _options(self) -> Iterable[SpecOption]:
        return (option for option in SPEC_OPTIONS if option.name in self.names)

    def _annotation(self, option: SpecOption, key: Key) -> object:
        """Return the annotation of an option's parameter, with the key's description and default as help."""
        default = (self.defaults or {}).get(option.key, key.default)
        if key.is_flag:
            return Annotated[bool, typer.Option(option.name, help=key.description, rich_help_panel=option.panel)]
        return Annotated[
            str | None,
            typer.Option(
                option.name,
                metavar=option.metavar,
                help=key.description,
                show_default=str(default) if default not in ("", 0) else False,
                rich_help_panel=option.panel,
            ),
        ]


def _python_name(option: SpecOption) -> str:
    return option.name.removeprefix("--").replace("-", "_")


def _parse_nodes(text: str) -> dict[str, Given]:
    """Return the keys min_nodes and max_nodes of `--nodes N` or `MIN:MAX`.

    With N, min_nodes is 0: all N must join first.

    Raises:
        BadInputError: MIN is not a number from 1 on.
    """
    least, colon, most = text.partition(":")
    if colon and not re.fullmatch("[1-9][0-9]{0,8}", least):
        raise BadInputError(f"--nodes is {text!r}: give a number of nodes, or MIN:MAX")
    return {
        "min_nodes": Given(least if colon else "0", "--nodes", text=True),
        NODES: Given(most if colon else text, "--nodes", text=True),
    }


def parse_settings(pairs: Sequence[str], struct: type[Struct], example: str, where: str) -> dict[str, Given]:
    """Parse `--set KEY=VALUE` pairs for the keys of a struct.

    Args:
        example: a pair, for the message.
        where: the command or page that lists the keys, for the message.

    Raises:
        BadInputError: a pair has no `=`, or its key is not known.
    """
    keys = keys_of(struct)
    given: dict[str, Given] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise BadInputError(f"--set is {pair!r}: write KEY=VALUE, such as {example}")
        check_known(name, keys, f"--set {name}", where)
        given[name] = Given(value, f"--set {name}", text=True)
    return given


def collect_job(
    source: str,
    args: Sequence[str],
    pairs: Sequence[str],
    options: Mapping[str, Given],
    *,
    as_module: bool = False,
) -> dict[str, Given]:
    """Return the settings of a job by key. Precedence: options, then `--set`, then the job's file.

    Args:
        source: a script, or a file that ends in .toml.
        args: arguments for the script; () for the arguments in the file.
        pairs: the `--set` pairs.
        options: values by key.
        as_module: `source` is the name of a module.

    Raises:
        BadInputError: the file cannot be read, a key is not known, or neither script nor module is given.
    """
    if as_module:
        given = {"module": Given(source, "-m")}
    else:
        given = read_toml(Path(source), JobSpec) if source.endswith(".toml") else {"script": Given(source, "SCRIPT")}
    given |= parse_settings(pairs, JobSpec, "checkpoint.every=50", "`holdfast schema job`")
    given |= options
    if args:
        given["args"] = Given(tuple(args), "ARGS")
    if "script" not in given and "module" not in given:
        raise BadInputError(
            f"{source}: script is missing: give the path of a Python file, or module and a module's name"
        )
    return given


def without_effect(given: Mapping[str, Given], spec: JobSpec) -> Iterator[str]:
    """Yield a warning for each given setting that has no effect without another one, which is not given.

    These are how often to save without --checkpoint-dir, and recovery by standbys without standbys.
    """
    for key in ("checkpoint.every", "checkpoint.rate"):
        if key in given and not spec.checkpoint.dir:
            yield f"{given[key].name} has no effect: give --checkpoint-dir, too"
    if spec.recovery.on_node_failure == "standby" and not spec.recovery.standbys:
        name = given["recovery.on_node_failure"].name
        yield f"{name} is standby, and the job has no standbys: it goes on with fewer nodes; give --standbys"


def job_spec(given: Mapping[str, Given]) -> JobSpec:
    """Return the job.

    Raises:
        BadInputError: a value breaks its key's rule.
    """
    return build_struct(JobSpec, given)
