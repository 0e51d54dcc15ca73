"""From a plan to the group of its members, in a thread beside training."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable

import torch

from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.groups.choose import build_communicator
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.graveyard import Graveyard
from holdfast.runtime.session.resources import Resources
from holdfast.runtime.session.state_exchange import Shared

logger = logging.getLogger(__name__)

#: Builds the group of a plan at a rank; blocks; raises HaltedError or PeerLostError.
GroupBuilder = Callable[[GenerationPlan, int, Resources], Communicator]


def group_builder(device: torch.device, host: str, graveyard: Graveyard) -> GroupBuilder:
    """Return what builds the groups of a worker on a device, reached at an address."""

    def build(plan: GenerationPlan, rank: int, resources: Resources) -> Communicator:
        return build_communicator(
            device,
            resources.board,
            rank,
            len(plan.members),
            generation=plan.generation,
            graveyard=graveyard,
            host=host,
            halt=resources.halt,
        )

    return build


class GroupBuilding:
    """Builds the groups that a session's machine asks for, each in a thread of its own."""

    def __init__(self, shared: Shared, build: GroupBuilder) -> None:
        self._shared = shared
        self._build = build

    def start(self, plan: GenerationPlan) -> None:
        """Begin to build the group of a plan; the lock is held."""
        resources = self._shared.generations.of(plan.generation)
        rank = plan.rank(self._shared.machine.worker)
        if resources is None or rank is None:
            return
        resources.plan = plan
        name = f"holdfast-build-{plan.generation}"
        threading.Thread(target=self._run, args=(plan, rank, resources), name=name, daemon=True).start()

    def _run(self, plan: GenerationPlan, rank: int, resources: Resources) -> None:
        try:
            communicator = self._build(plan, rank, resources)
        except HaltedError:
            return
        except PeerLostError as error:
            self._shared.lost(resources.generation, error)
            return
        except BaseException:  # noqa: BLE001
            # Nobody would ever learn of it in this thread: the worker would wait for its group for ever.
            traceback.print_exc()
            os._exit(1)
        with self._shared.changed:
            if resources.dropped:
                communicator.retire()
                return
            resources.communicator = communicator
            self._shared.carry_out(self._shared.machine.prepared(plan.generation))
            self._shared.changed.notify_all()
