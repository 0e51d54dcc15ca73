"""An agent's connection to a coordinator, FIFO with delays in each direction; it can break or become silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.coordination.inputs import Disconnected, Received
from holdfast.protocol.messages.agent import AgentMessage, CoordinatorMessage
from tests.simulation.world import World


class LowerEnd(Protocol):
    """An agent, as its connection sees it."""

    name: str

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def on_message(self, connection: SimConnection, message: CoordinatorMessage) -> None: ...

    def disconnected(self, connection: SimConnection) -> None: ...


class UpperEnd(Protocol):
    """A coordinator, as its connections see it."""

    def deliver(self, action: Callable[..., object], *args: Any) -> None: ...

    def feed_connection(self, number: int, event: Received) -> None: ...

    def forget_connection(self, number: int, event: Disconnected) -> None: ...


class SimConnection:
    """Both ends of a TCP connection."""

    def __init__(self, world: World, number: int, agent: LowerEnd, coordinator: UpperEnd) -> None:
        self.number = number
        self.agent = agent
        self.coordinator = coordinator
        self._world = world
        self._last_up = self._last_down = 0.0
        #: Whether the messages in flight are lost.
        self._lost = False
        #: Whether sending has ended.
        self._cut = False
        self._closing = False
        self._troubles = world.troubles(agent.name)

    def send_up(self, message: AgentMessage) -> None:
        """Send to the coordinator, which still receives while it closes the connection."""
        if not self._cut or self._closing:
            self._last_up = max(self._arrival(self._last_up), self._troubles.up_until)
            self._world.timeline.at(self._last_up, self._arrive_up, message)

    def send_down(self, message: CoordinatorMessage, leaves_at: float = 0.0) -> None:
        """Send to the agent at `leaves_at`, or now if that time has passed."""
        if not self._cut:
            self._last_down = max(self._arrival(self._last_down, leaves_at), self._troubles.down_until)
            self._world.timeline.at(self._last_down, self._arrive_down, message)

    def close_from_above(self) -> None:
        """Close the coordinator's end after its sent messages."""
        if not self._cut:
            self._cut = self._closing = True
            # The agent's messages still arrive until the closing handshake ends.
            self._world.timeline.after(self._world.rng.uniform(*self._world.timing.closing), self._end_above)
            self._last_down = self._arrival(self._last_down)
            self._world.timeline.at(self._last_down, self._notify_agent)

    def close_from_below(self, *, seen: bool = True) -> None:
        """Close the agent's end; if `seen`, the coordinator receives a reset after the sent messages."""
        if self._cut:
            return
        self._cut = True
        if seen:
            self._last_up = self._arrival(self._last_up)
            self._world.timeline.at(self._last_up, self._end_above)

    def cut(self, *, lose: bool, above_s: float, below_s: float) -> None:
        """Break the connection; each end notices after its own delay, and messages in flight may be lost."""
        if self._cut:
            return
        self._cut, self._lost = True, lose
        timeline = self._world.timeline
        timeline.at(max(self._last_up, timeline.now + above_s), self._end_above)
        timeline.at(max(self._last_down, timeline.now + below_s), self._notify_agent)

    def _arrival(self, last: float, leaves_at: float = 0.0) -> float:
        world = self._world
        return max(last, max(world.timeline.now, leaves_at) + world.rng.uniform(*world.timing.link))

    def _arrive_up(self, message: AgentMessage) -> None:
        if not self._lost:
            coordinator = self.coordinator
            coordinator.deliver(coordinator.feed_connection, self.number, Received(self.number, message))

    def _arrive_down(self, message: CoordinatorMessage) -> None:
        if not self._lost:
            self.agent.deliver(self.agent.on_message, self, message)

    def _end_above(self) -> None:
        coordinator = self.coordinator
        coordinator.deliver(coordinator.forget_connection, self.number, Disconnected(self.number))

    def _notify_agent(self) -> None:
        self.agent.deliver(self.agent.disconnected, self)
