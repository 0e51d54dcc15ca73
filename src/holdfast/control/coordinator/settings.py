"""The settings of a coordinator process, and their checks before anything is touched."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from holdfast.control.registry import check_name, check_token
from holdfast.coordination.config import CoordinatorConfig
from holdfast.environment import TOKEN
from holdfast.errors import BadInputError
from holdfast.protocol.record import KnownCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The settings of one coordinator."""

    #: configuration of the job's machine
    config: CoordinatorConfig
    #: address to listen on
    host: str = "127.0.0.1"
    #: port to listen on, or 0 for a free one
    port: int = 0
    #: the token that agents and commands must send, or None for a random one, on loopback only
    token: str | None = None
    #: `sqlite:PATH` or `memory:`
    store: str = "memory:"
    #: certificate chain to serve TLS, or None without TLS
    tls_cert: Path | None = None
    #: private key of the certificate
    tls_key: Path | None = None
    #: folder in which the job is listed for the commands of this machine, or None
    registry: Path | None = None
    #: intact checkpoints that exist already
    checkpoints: tuple[KnownCheckpoint, ...] = ()
    #: whether a launcher starts this coordinator: it reads the events, must not miss the last ones, and starts further
    #: nodes
    launched: bool = False
    #: seconds that the body of a request may take
    body_s: float = 10.0
    #: whether the starter has made sure that no process of an earlier run of the job lives
    alone: bool = False
    #: whether the store is next to the checkpoints, so that a finished job starts again from its newest checkpoint
    kept: bool = False

    @property
    def job(self) -> str:
        """The job's name."""
        return self.config.spec.name

    @property
    def journal_path(self) -> Path | None:
        """Path of the journal, or None for one in memory.

        It is the events file of the job, or else next to a SQLite store (PATH.events.jsonl). So a restarted coordinator
        knows where its predecessor stopped.
        """
        if self.config.spec.output.events:
            return Path(self.config.spec.output.events)
        kind, _, path = self.store.partition(":")
        return Path(f"{path}.events.jsonl") if kind == "sqlite" and path else None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Check that these settings can be served.

        Raises:
            BadInputError: the name or the token cannot be sent, the port is out of range, the address needs a token, or
                the certificate or its key is missing or broken.
        """
        check_name("the job's name", self.job)
        check_listening(self.host, self.port, self.token, self.tls_cert, self.tls_key)


def check_listening(host: str, port: int, token: str | None, tls_cert: Path | None, tls_key: Path | None) -> None:
    """Check that a server can listen with this address, port, token and TLS certificate.

    Raises:
        BadInputError: the token cannot be sent, the port is out of range, the address needs a token, or the certificate
            or its key is missing or broken.
    """
    if not 0 <= port <= 65535:
        raise BadInputError(f"the port is {port}: it must be between 0 (a free one) and 65535")
    if token is not None:
        check_token(token)
    elif not is_loopback(host):
        raise BadInputError(
            f"the address {host} can be reached from outside: give a token in {TOKEN} or --token-file, "
            "or listen on 127.0.0.1"
        )
    if (tls_cert is None) != (tls_key is None):
        raise BadInputError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    if tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise BadInputError(f"the certificate {tls_cert} cannot be used with its key: {error}") from None


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only. False for host names other than localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
