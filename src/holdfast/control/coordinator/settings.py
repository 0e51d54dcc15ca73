"""What a coordinator's process is told, and what of it is refused before anything is touched."""

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
    """One coordinator.

    config: of the machine, with the job. host: the address to listen on. port: 0 for a free one.
    token: what agents and commands must show; None for a fresh random one, on loopback only. store: `sqlite:PATH` or
    `memory:`. tls_cert, tls_key: serve TLS. registry: where the job is listed for the commands of this machine; None
    for nowhere. checkpoints: intact ones that lie there already.
    launched: whoever started this coordinator reads its events, must not miss the last ones, and starts further nodes.
    body_s: how long a request's body may take.
    alone: whoever starts this coordinator has made sure that nothing of an earlier run of the job lives. kept: the
    store lies next to the checkpoints: a job that is over begins again from its newest checkpoint.
    """

    config: CoordinatorConfig
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    store: str = "memory:"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    registry: Path | None = None
    checkpoints: tuple[KnownCheckpoint, ...] = ()
    launched: bool = False
    body_s: float = 10.0
    alone: bool = False
    kept: bool = False

    @property
    def job(self) -> str:
        """The job's name."""
        return self.config.spec.name

    @property
    def journal_path(self) -> Path | None:
        """Where the journal lies, None for in memory: in the events file that the job names, else beside a SQLite store
        (PATH.events.jsonl), so that a coordinator that is restarted knows where it stopped."""
        if self.config.spec.output.events:
            return Path(self.config.spec.output.events)
        kind, _, path = self.store.partition(":")
        return Path(f"{path}.events.jsonl") if kind == "sqlite" and path else None

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            BadInputError: the name or the token cannot be sent, the port is out of range, the address needs a token, or
                the certificate or its key is missing or broken.
        """
        check_name("the job's name", self.job)
        check_listening(self.host, self.port, self.token, self.tls_cert, self.tls_key)


def check_listening(host: str, port: int, token: str | None, tls_cert: Path | None, tls_key: Path | None) -> None:
    """Refuse a place to listen at that cannot be served.

    Raises:
        BadInputError: the token cannot be sent, the port is out of range, the address needs a token, or the certificate
            or its key is missing or broken.
    """
    if not 0 <= port <= 65535:
        raise BadInputError(f"the port is {port}: it must lie between 0 (a free one) and 65535")
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
    """Tell whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
