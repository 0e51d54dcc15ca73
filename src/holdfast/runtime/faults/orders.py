"""Fault injection: executes a fault now, or when a step reaches a given phase."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from holdfast.control.link.silenced_network import block_incoming_tcp
from holdfast.errors import HoldfastError
from holdfast.protocol.messages.orders import Inject

logger = logging.getLogger(__name__)

EXIT_CODE = 13
#: Faults that only the training thread can execute.
IN_THREAD = ("raise", "memory", "hold", "hang", "slow", "slow-link", "drop", "corrupt-state")


class InjectedError(HoldfastError):
    """The exception of `fault="raise"`."""


class Faults:
    """The faults that this worker was ordered to execute. Thread-safe."""

    def __init__(self, agent_pid: Callable[[], int | None]) -> None:
        """Start without faults; the coordinator's orders add them.

        Args:
            agent_pid: returns the agent's process, which also dies if the whole node should; None without an agent.
        """
        self._agent_pid = agent_pid
        self._lock = threading.Lock()
        self._pending: list[Inject] = []
        self._hold: Callable[[], None] = lambda: None
        self._drop: Callable[[], None] = lambda: None
        self._corrupt: Callable[[], None] = lambda: None
        self._slowdown, self._link_slowdown = 1.0, 1.0
        self._disk_full = False

    def register_actions(
        self, *, hold: Callable[[], None], drop: Callable[[], None], corrupt: Callable[[], None]
    ) -> None:
        """Register what three of the faults do. All are called in the training thread.

        Args:
            hold: returns when the generation is over.
            drop: breaks the connections to all peers.
            corrupt: flips a bit.
        """
        self._hold, self._drop, self._corrupt = hold, drop, corrupt

    def on_inject(self, inject: Inject) -> None:
        """Execute a fault at once if it has no step and no phase and does not need the training thread; else log it and
        keep it until it is due.
        """
        if inject.step is None and not inject.phase and inject.fault not in IN_THREAD:
            self._strike(inject)
            return
        with self._lock:
            self._pending.append(inject)
        when = "the next step" if inject.step is None else f"step {inject.step}"
        logger.warning("fault injection: %s will strike at %s, %s", inject.fault, when, inject.phase or "any phase")

    def is_due(self, phase: str, step: int) -> bool:
        """Return whether `strike_at` would execute a fault."""
        return bool(self._pending) and any(_is_due(inject, phase, step) for inject in list(self._pending))

    def strike_at(self, phase: str, step: int) -> None:
        """Execute the first fault that is due in this phase of a step, once. May not return.

        Raises:
            InjectedError: fault="raise".
            MemoryError: fault="memory".
        """
        if self._pending:
            self._strike_due(phase, step, raising=True)

    def strike_in_compute(self, step: int) -> None:
        """Execute a fault that is due in the middle of a micro-batch: a hang without a phase, or with the phase
        `compute`.
        """
        if self._pending:
            self._strike_due("compute", step, raising=True, at_work=True)

    def slow_down(self, since: float) -> None:
        """Delay the end of a micro-batch that started at `since` (`time.monotonic()`), if the worker should be slow."""
        if self._slowdown > 1.0:
            time.sleep((self._slowdown - 1.0) * (time.monotonic() - since))

    @property
    def slow_link(self) -> float:
        """How many times slower this worker's data should reach its peers; 1: unchanged."""
        return self._link_slowdown

    def strike_at_disk(self) -> None:
        """Fail the write of a checkpoint, if that is due.

        Raises:
            OSError: fault="disk-full": no space is left.
        """
        if self._disk_full:
            raise OSError(errno.ENOSPC, f"injected fault: {os.strerror(errno.ENOSPC)}")

    def strike_in_side_thread(self, phase: str, step: int) -> None:
        """Execute a fault that is due in this phase, called by another thread than the training thread. Faults that
        only the training thread can execute are left; a due exception is raised there at its next phase.
        """
        if not self._pending:
            return
        with self._lock:
            for place, inject in enumerate(self._pending):
                if inject.fault == "raise" and inject.phase == phase and _is_due(inject, phase, step):
                    self._pending[place] = Inject(fault="raise", whole_node=inject.whole_node)
        self._strike_due(phase, step, raising=False)

    def _strike_due(self, phase: str, step: int, *, raising: bool, at_work: bool = False) -> None:
        """Remove and execute the first fault that is due, if there is one.

        Args:
            raising: whether this is the training thread, which can execute all faults.
            at_work: whether this is the middle of a micro-batch: only the faults of `strike_in_compute` strike there,
                and only there.
        """
        with self._lock:
            here = (inject for inject in self._pending if _strikes_in_compute(inject) == at_work)
            wanted = (inject for inject in here if raising or inject.fault not in IN_THREAD)
            due = next((inject for inject in wanted if _is_due(inject, phase, step)), None)
            if due is not None:
                self._pending.remove(due)
        if due is not None:
            self._strike(due)

    def _strike(self, inject: Inject) -> None:
        """Execute a fault now: raise, call a registered action, hang, slow this worker or its link down, block its
        network, fill its disk, or end the process (all other faults).

        Raises:
            InjectedError: fault="raise".
            MemoryError: fault="memory".
        """
        match inject.fault:
            case "raise":
                raise InjectedError("injected fault: an exception in the training thread")
            case "memory":
                raise MemoryError("injected fault: there is no memory for the training thread")
            case "hold":
                self._hold()
            case "hang":
                hang_forever()
            case "slow":
                self._slowdown = inject.times
            case "slow-link":
                self._link_slowdown = inject.times
            case "drop":
                self._drop()
            case "corrupt-state":
                self._corrupt()
            case "link-down":
                block_incoming_tcp()
            case "disk-full":
                self._disk_full = True
            case _:
                self._end_process(inject)

    def _end_process(self, inject: Inject) -> None:
        """End this process: exit with `EXIT_CODE`, stop it ("freeze"), or kill it (any other fault). With `whole_node`,
        its agent is stopped or killed first; "exit" leaves the agent alone.
        """
        agent = self._agent_pid() if inject.whole_node else None
        if inject.fault == "exit":
            os._exit(EXIT_CODE)
        number = signal.SIGSTOP if inject.fault == "freeze" else signal.SIGKILL
        if agent is not None:
            os.kill(agent, number)
        os.kill(os.getpid(), number)


def hang_forever() -> None:
    """Block forever; only the end of the process ends this thread."""
    threading.Event().wait()


def _strikes_in_compute(inject: Inject) -> bool:
    """Return whether a fault strikes in the middle of a micro-batch."""
    return inject.fault == "hang" and inject.phase in ("", "compute")


def _is_due(inject: Inject, phase: str, step: int) -> bool:
    """Return whether a fault is due. Without a phase it strikes at the next one; a past step counts too.

    But `hold` strikes only at its own step: after an earlier halt it would stop the job without effect.
    """
    late = inject.step is None or step == inject.step or (step > inject.step and inject.fault != "hold")
    return inject.phase in ("", phase) and late
