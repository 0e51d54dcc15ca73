"""The processes that a launcher starts, as `python -m holdfast.control.launch.children coordinator|agent`.

They read their settings from stdin. These hold the job's token: a pipe leaves no file behind and shows nothing in the
process list.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.control.agent.settings import AgentSettings
from holdfast.control.coordinator.settings import ServerSettings
from holdfast.control.processes import ChildProcess, blocked_sigint, die_with_parent, handled_sigint, print_error
from holdfast.errors import EXIT_INTERRUPTED, EXIT_OUR_FAULT, HoldfastError


class CoordinatorOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this coordinator. It ends with the process `parent`."""

    settings: ServerSettings
    parent: int
    log: str


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this agent. Its settings name its parent."""

    settings: AgentSettings
    log: str


def spawn(order: CoordinatorOrder | AgentOrder, environment: Mapping[str, str]) -> ChildProcess:
    """Start a process that executes an order: a coordinator or an agent.

    The order goes to its stdin. A process that dies at once is returned, too; its exit code shows why.
    """
    # The kind is on the command line so that process lists show it.
    kind = "coordinator" if isinstance(order, CoordinatorOrder) else f"agent:{order.settings.node}"
    command = [sys.executable, "-P", "-m", "holdfast.control.launch.children", kind]
    with blocked_sigint():
        child = ChildProcess(command, environment=environment, stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(order, enc_hook=_path_to_text))
        child.stdin.close()
    except BrokenPipeError:
        pass  # it died at once, and its exit code shows why
    return child


def execute_order(order: CoordinatorOrder | AgentOrder) -> int:
    """Run the coordinator or the agent of an order in this process, and return its exit code.

    A coordinator ends with the process `parent`.
    """
    # Imported only here, because agents, coordinators and launchers need different modules.
    if isinstance(order, AgentOrder):
        from holdfast.control.agent.node_agent import run_agent

        return run_agent(order.settings, print_error)
    from holdfast.control.coordinator.server import run_coordinator

    die_with_parent(order.parent)
    return run_coordinator(order.settings)


def main() -> int:
    """Read an order from stdin, run that coordinator or agent, and return its exit code.

    Errors of holdfast are printed in a line and have their own codes, and SIGINT gives `EXIT_INTERRUPTED`. Other errors
    are printed with a traceback, and the code is `EXIT_OUR_FAULT`; only SystemExit passes.
    """
    try:
        with handled_sigint():
            order = msgspec.json.decode(
                sys.stdin.buffer.read(), type=CoordinatorOrder | AgentOrder, dec_hook=_text_to_path
            )
            logging.basicConfig(level=order.log.upper(), format="%(name)s: %(message)s")
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            return execute_order(order)
    except HoldfastError as error:
        print_error(f"holdfast: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED  # interrupted before it had started, so there is nothing to report
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        traceback.print_exc()
        return EXIT_OUR_FAULT  # if this is a coordinator, the launcher starts another one


def _path_to_text(value: Any) -> Any:
    """Encode a `Path` for JSON.

    Raises:
        NotImplementedError: another type.
    """
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} is not for sending")


def _text_to_path(kind: type, value: Any) -> Any:
    """Decode a `Path` from JSON.

    Raises:
        NotImplementedError: another type.
    """
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} is not for sending")


if __name__ == "__main__":
    sys.exit(main())
