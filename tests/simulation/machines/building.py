"""The process groups that one simulated worker builds in the background."""

from __future__ import annotations

from holdfast.protocol.messages import any_side as msg
from holdfast.protocol.names import key_of, node_of
from tests.simulation.collectives import Group
from tests.simulation.machines.host import WorkerHost


class Building:
    """A group under construction: the members' addresses received so far, and whether the group is built."""

    __slots__ = ("built", "got", "group", "pending", "plan", "posts_needed")

    def __init__(self, plan: msg.GenerationPlan, group: Group, pending: bool, got: set[str]) -> None:
        self.plan = plan
        self.group = group
        self.pending = pending
        self.got = got
        self.posts_needed = len(plan.members)
        self.built = False


class Builder:
    """All groups that a worker is building or has built, by generation."""

    def __init__(self, worker: WorkerHost) -> None:
        self._worker = worker
        self._builds: dict[int, Building] = {}
        self._early_posts: dict[int, set[str]] = {}

    def group(self, generation: int) -> Group | None:
        """Return the group of a generation, complete or not, or None if it is not under construction."""
        building = self._builds.get(generation)
        return building.group if building else None

    def stands(self, generation: int) -> bool:
        """Return whether the group of a generation is built."""
        building = self._builds.get(generation)
        return building is not None and building.built

    def fail(self) -> None:
        """Fail the collectives of this worker, which is dead."""
        for building in self._builds.values():
            building.group.fail(self._worker.id)

    def stall(self) -> None:
        """Stall the collectives of this worker, which is paused."""
        for building in self._builds.values():
            building.group.stall(self._worker.id)

    def unstall(self) -> None:
        """Continue the stalled collectives of this worker."""
        for building in self._builds.values():
            building.group.unstall(self._worker.id)

    def drop(self, generation: int) -> None:
        """Forget a group that is not needed any longer."""
        self._builds.pop(generation, None)

    def begin(self, plan: msg.GenerationPlan, pending: bool) -> None:
        """Build the group of a generation, and forget the groups of earlier generations."""
        worker, world = self._worker, self._worker.world
        for generation in [generation for generation in self._builds if generation < worker.machine.generation]:
            del self._builds[generation]
        rank = plan.rank(worker.id)
        assert rank is not None, f"{worker.id} was ordered to build a group without being a member"
        own = key_of(rank, "address")
        got = {own} | self._early_posts.pop(plan.generation, set())
        building = self._builds[plan.generation] = Building(plan, world.group(plan), pending, got)
        worker.send(msg.Post(worker=worker.id, generation=plan.generation, keys={own: b"address"}))
        world.timeline.after(world.timing.build_timeout_s, worker.deliver, self._late, building)
        self._connect(building)

    def posted(self, posted: msg.Posted) -> None:
        """Handle the addresses of members, which may arrive before the order to build."""
        building = self._builds.get(posted.generation)
        if building is None:
            self._early_posts.setdefault(posted.generation, set()).update(posted.keys)
            return
        building.got.update(posted.keys)
        self._connect(building)

    def _connect(self, building: Building) -> None:
        if len(building.got) == building.posts_needed:
            self._worker.world.after("build", self._worker, self._built, building)

    def _built(self, building: Building) -> None:
        worker, world, plan = self._worker, self._worker.world, building.plan
        if self._builds.get(plan.generation) is not building:
            return
        if building.group.failed:
            if world.rng.random() < 0.5:
                worker.obey(worker.machine.complain(plan.generation, "a peer is gone while the group is built"))
            return
        if not world.data_plane.reaches(worker.node, building.group.nodes):
            world.data_plane.when_healed(lambda: world.after("build", worker, self._built, building))
            return
        building.built = True
        if worker.boundary("built"):
            return
        if building.pending:
            worker.obey(worker.machine.on_group_ready(plan.generation))
        worker.advance()

    def _late(self, building: Building) -> None:
        worker, generation = self._worker, building.plan.generation
        if self._builds.get(generation) is building and not building.built:
            why, missing = "the group could not be built in time", self.cut_off(generation)
            worker.obey(worker.machine.complain(generation, why, timed_out=True, unreachable=missing))

    def cut_off(self, generation: int) -> list[str]:
        """Return the members of a generation that cannot be reached from here."""
        worker, building = self._worker, self._builds.get(generation)
        nodes = worker.world.cut_off(worker.node, building.group.nodes) if building else ()
        return [peer for peer in building.plan.workers if node_of(peer) in nodes] if building and nodes else []

    def look_around(self, generation: int) -> None:
        """Handle the coordinator's notice that all members wait: report the unreachable members."""
        worker = self._worker
        if worker.machine.on_wait_timeout(generation):
            worker.world.after("look", worker, self._looked, generation)

    def _looked(self, generation: int) -> None:
        worker, why = self._worker, "all members wait for each other"
        worker.obey(worker.machine.complain(generation, why, unreachable=self.cut_off(generation)))
        worker.advance()
