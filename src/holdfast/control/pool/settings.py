"""The settings of a pool process."""

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
    """The settings of one pool. `host` to `registry` are as in `ServerSettings`."""

    #: name of the pool
    name: str = "pool"
    #: policy that divides the nodes among the jobs
    policy: str = "equal"
    #: number of nodes in reserve, or "auto": the pool chooses it; see `PoolConfig`
    reserve: int | Literal["auto"] = 0
    #: whether a started job may be left without nodes
    allow_starving: bool = False
    #: as in `PoolConfig`
    expected: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    store: str = "memory:"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    registry: Path | None = None
    #: folder of the journals of the pool and its jobs, or None for journals in memory, which are lost with the process
    folder: Path | None = None
    #: folder in which the pool's own nodes keep the output of jobs, or "" without own nodes
    logs: str = ""

    @property
    def config(self) -> PoolConfig:
        """The configuration of the pool's machine.

        With `allow_starving` the policy is `Waf`, whatever `policy` says.
        """
        # The policies import NumPy, which takes longer to load than most commands run.
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

    def job_token(self, job: str, submission: int) -> str:
        """Return the token with which a job's nodes authenticate to its coordinator.

        It is the same after a restart of the server.
        """
        assert self.token is not None
        return hmac.new(self.token.encode(), f"job {job}/{submission}".encode(), "sha256").hexdigest()

    def check(self) -> None:
        """Check the name, and that a server can listen with these settings.

        Raises:
            BadInputError: as `check_name` and `check_listening`.
        """
        check_name("the pool's name", self.name)
        check_listening(self.host, self.port, self.token, self.tls_cert, self.tls_key)

    def job_journal(self, job: str, submission: int) -> str:
        """Return the path of the events file of a job without one of its own, or "" for none."""
        return str(self.folder / f"{job}.{submission}.events.jsonl") if self.folder else ""


def default_folder(store: str) -> Path | None:
    """Return the folder of the journals next to a SQLite store, or None for another store."""
    kind, _, path = store.partition(":")
    return Path(f"{path}.journals") if kind == "sqlite" and path else None


def check_policy(policy: str) -> None:
    """Check that a policy exists.

    Raises:
        BadInputError: it does not. The message lists the existing ones.
    """
    if policy not in POLICY_NAMES:
        raise BadInputError(f"--policy is {policy!r}: it must be {', '.join(POLICY_NAMES)}")
