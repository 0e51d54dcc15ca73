"""What a pool's process is told."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.control.coordinator.settings import check_listening
from holdfast.control.registry import check_name
from holdfast.coordination.pool.share.interface import POLICY_NAMES
from holdfast.errors import BadInputError

if TYPE_CHECKING:
    from holdfast.coordination.pool.state import PoolConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """One pool.

    name: its own. policy: how nodes are shared out; allow_starving: a job that was begun may be left with none.
    reserve ("auto": the pool says how many), expected: as of `PoolConfig`. host, port, token, store, tls_cert, tls_key,
    registry: as of `ServerSettings`. folder: where journals lie, the pool's and its jobs'; None: in
    memory, and gone with the process. logs: where the pool's own nodes keep what jobs print, "" where it has none.
    """

    name: str = "pool"
    policy: str = "equal"
    reserve: int | Literal["auto"] = 0
    allow_starving: bool = False
    expected: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    store: str = "memory:"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    registry: Path | None = None
    folder: Path | None = None
    logs: str = ""

    @property
    def config(self) -> PoolConfig:
        """Return what the pool's machine is told."""
        # NumPy, with which policies reckon, takes longer to load than most commands take
        from holdfast.coordination.pool.share.achieving import Waf
        from holdfast.coordination.pool.share.policies import POLICIES
        from holdfast.coordination.pool.state import PoolConfig

        policy = Waf(starves=True) if self.allow_starving else POLICIES[self.policy]
        return PoolConfig(
            name=self.name,
            policy=policy,
            reserve=0 if self.reserve == "auto" else self.reserve,
            auto_reserve=self.reserve == "auto",
            expected=self.expected,
        )

    def token_of(self, job: str, submission: int) -> str:
        """Return what a job's nodes show its coordinator: the same from each of the pool's servers."""
        assert self.token is not None
        return hmac.new(self.token.encode(), f"job {job}/{submission}".encode(), "sha256").hexdigest()

    def check(self) -> None:
        """Refuse what cannot be served.

        Raises:
            BadInputError: as `check_listening`.
        """
        check_name("the pool's name", self.name)
        check_listening(self.host, self.port, self.token, self.tls_cert, self.tls_key)

    def journal_of(self, job: str, submission: int) -> str:
        """Return where a job's events go that has named no file, "" for nowhere."""
        return str(self.folder / f"{job}.{submission}.events.jsonl") if self.folder else ""


def default_folder(store: str) -> Path | None:
    """Return where journals lie beside a SQLite store, None where the pool keeps none."""
    kind, _, path = store.partition(":")
    return Path(f"{path}.journals") if kind == "sqlite" and path else None


def check_policy(policy: str) -> None:
    """Refuse a policy that there is not.

    Raises:
        BadInputError: with those that there are.
    """
    if policy not in POLICY_NAMES:
        raise BadInputError(f"--policy is {policy!r}: it must be {', '.join(POLICY_NAMES)}")
