"""Options of servers and nodes: the address to listen on, and the properties of a node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.connection import TokenFile
from holdfast.cli.options import CONNECTION, JOB, RECOVERY
from holdfast.control.addresses import advertised_address
from holdfast.control.registry import check_name
from holdfast.documents import shorten
from holdfast.errors import BadInputError
from holdfast.protocol.names import ADDRESS_PATTERN, FAILURE_RATES, RACK_PATTERN

_MOST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """The address on which a coordinator listens."""

    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to listen on; port 0: a free one. An address that other hosts can reach needs a token.",
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
            BadInputError: the option is not HOST:PORT.
        """
        host, colon, port = self.listen.rpartition(":")
        if not (host and colon and re.fullmatch("[0-9]{1,5}", port) and int(port) <= _MOST_PORT):
            raise BadInputError(f"--listen is {shorten(self.listen)}: it must be HOST:PORT, such as 127.0.0.1:7000")
        return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """The properties of a node that the other nodes know."""

    node_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Unique name of this node.",
            show_default="the host's, and the pid",
            rich_help_panel=JOB,
        ),
    ] = ""
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Address of this node for the other nodes.",
            show_default="the local address of the connection to the coordinator",
            rich_help_panel=CONNECTION,
        ),
    ] = ""
    rack: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Rack: its nodes may fail together.",
            show_default="a rack of its own",
            rich_help_panel=RECOVERY,
        ),
    ] = ""
    zone: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Zone of the rack; nodes of it replace each other.",
            show_default="none",
            rich_help_panel=RECOVERY,
        ),
    ] = ""
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Wait as a warm standby.",
            rich_help_panel=RECOVERY,
        ),
    ] = False
    failure_rate: Annotated[
        float,
        typer.Option(
            metavar="R",
            help="Relative failure rate; spot: 10. Experts with few replicas avoid the node.",
            rich_help_panel=RECOVERY,
        ),
    ] = 1.0

    def advertised(self, server: str) -> str:
        """Return the address at which the other nodes reach this one; an IPv6 address may be given in brackets.

        Args:
            server: the URL of the coordinator or the pool.

        Raises:
            OSError: no route leads to it.
        """
        return self._own_address or advertised_address(server)

    @property
    def _own_address(self) -> str:
        return self.advertise.strip("[]")

    def check(self) -> None:
        """Check the names and the address.

        Raises:
            BadInputError: naming the option.
        """
        if self.node_name:
            check_name("--node-name", self.node_name)
        for option, name in (("--rack", self.rack), ("--zone", self.zone)):
            if not re.fullmatch(RACK_PATTERN, name):
                raise BadInputError(f"{option} is {name!r}: use letters, digits, dots, dashes, at most 64")
        if not re.fullmatch(ADDRESS_PATTERN, self._own_address):
            raise BadInputError(f"--advertise is {self.advertise!r}: give a host name or an IP address")
        least, most = FAILURE_RATES
        if not least <= self.failure_rate <= most:
            raise BadInputError(f"--failure-rate is {self.failure_rate:g}: give a number from {least:g} to {most:g}")
