"""Builds the groups of a generation, in a thread next to training."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Sequence
from functools import partial

import torch

from holdfast.planning.levels import FLAT_UP_TO
from holdfast.protocol.job_spec import AUTO, Backend
from holdfast.protocol.plan import GenerationPlan
from holdfast.runtime.generation.resources import Groups, Resources, SharedContext
from holdfast.runtime.groups.abandoned_groups import GroupReaper
from holdfast.runtime.groups.communicator import Communicator, HaltedError, PeerLostError
from holdfast.runtime.groups.concurrent_build import build_concurrently
from holdfast.runtime.groups.transport_choice import build_communicator

logger = logging.getLogger(__name__)


class GroupBuilder:
    """Builds the groups of one worker, and keeps abandoned groups until their operations have ended."""

    def __init__(self, device: torch.device, host: str, backend: Backend = AUTO) -> None:
        """Build groups on a device; peers reach this worker at `host`."""
        self._device = device
        self._backend: Backend = backend
        self._host = host
        self._reaper = GroupReaper()

    def build(self, plan: GenerationPlan, rank: int, resources: Resources) -> Groups:
        """Build the groups of a plan, as one of its ranks: one group if all members have one role, else two. Blocks.

        Args:
            resources: of the plan's generation: the board for the rendezvous, and the event that halts it.

        Raises:
            HaltedError, PeerLostError: the generation was halted, or a member did not join.
        """
        domain, wide = plan.domain_of(plan.workers[rank]), plan.expert_plan is not None
        if len(domain) == len(plan.members):
            world = self._build(plan, domain, rank=rank, resources=resources, any_to_any=wide)
            return Groups(world=world, domain=world)
        all_ranks = range(len(plan.members))
        build = partial(self._build, plan, rank=rank, resources=resources)
        world, domain_group = build_concurrently(
            [
                partial(build, all_ranks, any_to_any=wide, name="world/"),
                partial(build, domain, any_to_any=False, name=f"domain-{domain[0]}/"),
            ]
        )
        return Groups(world=world, domain=domain_group)

    def _build(
        self,
        plan: GenerationPlan,
        ranks: Sequence[int],
        *,
        rank: int,
        resources: Resources,
        any_to_any: bool,
        name: str = "",
    ) -> Communicator:
        """Build the group of some ranks of a plan, in their order.

        Args:
            any_to_any: whether members exchange tokens or experts with every other one.
            name: prefix of the group's rendezvous keys.
        """
        return build_communicator(
            self._device,
            resources.board,
            rank,
            [plan.members[one].node for one in ranks],
            members=ranks,
            name=name,
            generation=plan.generation,
            reaper=self._reaper,
            any_to_any=any_to_any,
            backend=self._backend,
            host=self._host,
            halt=resources.halt,
            # A worker that computes nothing takes over another's rank, so it must not change the order of sums.
            flat_up_to=FLAT_UP_TO + (sum(not plan.counts[plan.unit_of(one)] for one in ranks) if plan.counts else 0),
        )

    def close(self, timeout_s: float) -> None:
        """Wait for abandoned groups to end, at most `timeout_s` seconds."""
        self._reaper.close(timeout_s)


class BackgroundBuilds:
    """Builds the groups that a session's machine asks for, each in its own thread."""

    def __init__(self, shared: SharedContext, builder: GroupBuilder) -> None:
        self._shared = shared
        self._builder = builder

    def start(self, plan: GenerationPlan) -> None:
        """Start a thread that builds the groups of a plan. The caller holds the lock.

        Ignored if the generation is over, or this worker is not a member.
        """
        resources = self._shared.resources.of(plan.generation)
        rank = plan.rank(self._shared.machine.worker)
        if resources is None or rank is None:
            return
        resources.plan = plan
        name = f"holdfast-build-{plan.generation}"
        threading.Thread(target=self._run, args=(plan, rank, resources), name=name, daemon=True).start()

    def _run(self, plan: GenerationPlan, rank: int, resources: Resources) -> None:
        """Build the groups of a plan, wait for shadow steps to end, store the groups, and tell the machine.

        A lost peer is reported as a failure of the generation, and a halt is ignored. Any other error ends the process.
        Groups of a generation that was dropped meanwhile are retired.
        """
        try:
            groups = self._builder.build(plan, rank, resources)
        except HaltedError:
            return
        except PeerLostError as error:
            self._shared.report_failure(resources.generation, error)
            return
        except BaseException:  # noqa: BLE001
            # No other thread would learn of the error: the worker would wait for its groups forever.
            traceback.print_exc()
            os._exit(1)
        with self._shared.changed:
            # The swap must come after the worker's shadow steps.
            self._shared.changed.wait_for(lambda: resources.dropped or not self._shared.machine.warming.is_running)
            if resources.dropped:
                groups.retire()
                return
            groups.world.report_waits_to(self._shared.progress)
            groups.domain.report_waits_to(self._shared.progress)
            resources.groups = groups
            self._shared.execute(self._shared.machine.on_group_ready(plan.generation))
            self._shared.changed.notify_all()
