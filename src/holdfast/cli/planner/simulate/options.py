"""Option groups of `holdfast simulate`: the random failures of one job, and the trace of a pool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import BadInputError

#: the panel of what concerns pools
POOLS = "Jobs that share a pool"


@dataclass(frozen=True, kw_only=True)
class DrawnFailures:
    """How often nodes fail, and how often that is drawn."""

    mtbf: Annotated[
        str | None,
        typer.Option(metavar="HOURS", help="Mean time between failures of a node.", show_default="6334"),
    ] = None
    mttr: Annotated[
        str | None,
        typer.Option(metavar="HOURS", help="Mean time to repair of a node.", show_default="133"),
    ] = None
    standbys: Annotated[str | None, typer.Option(metavar="N", help="Further nodes, warm and idle.")] = None
    replications: Annotated[int | None, typer.Option(help="Independent simulations.", show_default="20")] = None
    scale: Annotated[bool, typer.Option("--scale", help="Show recovery times for 4 to 16,384 nodes.")] = False

    @property
    def keys(self) -> dict[str, str]:
        """What is given of the model's keys."""
        said = {"mtbf_hours": self.mtbf, "mttr_hours": self.mttr, "standbys": self.standbys}
        return {key: value for key, value in said.items() if value is not None}

    def check_unused(self) -> None:
        """Refuse options without effect next to a trace, which contains its own failures.

        Raises:
            BadInputError: naming the option.
        """
        said = {
            "--mtbf": self.mtbf,
            "--mttr": self.mttr,
            "--standbys": self.standbys,
            "--replications": self.replications,
        }
        for name, value in said.items():
            if value is not None:
                raise BadInputError(f"{name} is {value}: it has no effect with --availability; leave one of them out")
        if self.scale:
            raise BadInputError("--scale shows one job's recovery: leave out --availability, or --scale")


@dataclass(frozen=True, kw_only=True)
class PoolTrace:
    """What jobs that share a pool live through, and how."""

    availability: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="CSV of a pool's nodes, or trace-a, trace-b. Its header is seconds,event,node, the events are add, "
            "remove, fault. The two traces are from the Unicron paper.",
            rich_help_panel=POOLS,
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Policies and systems to compare (docs/fleet.md).",
            show_default="waf,equal,weighted,hit-only,megatron",
            rich_help_panel=POOLS,
        ),
    ] = None
    job: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="JOB.toml",
            help=r"Job of the pool, with \[pace]. It needs output.flop_per_sample, too.",
            show_default="six of Unicron's Table 3",
            rich_help_panel=POOLS,
        ),
    ] = None

    def check_unused(self) -> None:
        """Refuse --policy and --job, which have no effect without a trace.

        Raises:
            BadInputError: naming the option.
        """
        for name, value in (("--policy", self.policy), ("--job", self.job)):
            if value:
                raise BadInputError(f"{name} is only for a pool: give --availability TRACE, too")
