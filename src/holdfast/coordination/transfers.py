"""Which nodes failed to send the state to which others, and which receivers got it from another node instead.

The planner uses it to select senders; `failures.suspects` uses it to tell a bad sender from a bad receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

#: The newest failures are kept, at most this many.
_KEPT = 4096
#: A sender is the suspect after this many receivers failed with it and then got the state elsewhere.
_ENOUGH_RECEIVERS = 2


class TransferHistory:
    """Failed transfers between nodes, by their names."""

    def __init__(self) -> None:
        #: (sender, receiver) -> whether the receiver has got the state from another node since
        self._failed: dict[tuple[str, str], bool] = {}
        #: how often a receiver has tried in vain to get the state
        self._tries = Counter[str]()

    def __bool__(self) -> bool:
        return bool(self._failed)

    def note_failure(self, receiver: str, senders: Iterable[str]) -> None:
        """Record that these nodes could not send their state to the receiver: one more try of it. The newest 4096 are
        kept.
        """
        self._tries[receiver] += 1
        for sender in senders:
            self._failed.pop((sender, receiver), None)
            self._failed[sender, receiver] = False
        while len(self._failed) > _KEPT:
            del self._failed[next(iter(self._failed))]
        while len(self._tries) > _KEPT:
            del self._tries[next(iter(self._tries))]

    def note_receipt(self, receiver: str, senders: Iterable[str]) -> None:
        """Record that a node has received the state from these nodes.

        Its failures with them are forgotten, and its tries too. Its failures with others now count against those.
        """
        self._tries.pop(receiver, None)
        if not self._failed:
            return
        sent = set(senders)
        for sender, other in [pair for pair in self._failed if pair[1] == receiver]:
            if sender in sent:
                del self._failed[sender, other]
            else:
                self._failed[sender, other] = True

    def forget(self, node: str) -> None:
        """Forget a removed node's tries and failures.

        Kept are failures of others with it as receiver, if it then got the state elsewhere: they speak against the
        sender.
        """
        self._tries.pop(node, None)
        if self._failed:
            self._failed = {
                (sender, receiver): elsewhere
                for (sender, receiver), elsewhere in self._failed.items()
                if sender != node and (receiver != node or elsewhere)
            }

    def failed(self, sender: str, receiver: str) -> bool:
        """Return whether a node could not send its state to another, and has not since."""
        return (sender, receiver) in self._failed

    def tries(self, receiver: str) -> int:
        """Return how often a node has tried in vain to get the state since it came, or got it last."""
        return self._tries[receiver]

    def failures_by_sender(self) -> Counter[str]:
        """Return for each node to how many receivers it failed to send its state, also if they got it elsewhere."""
        return Counter(sender for sender, _ in self._failed)

    def is_suspect(self, sender: str) -> bool:
        """Return whether several receivers failed with this sender and then received from another."""
        proven = sum(elsewhere for (one, _), elsewhere in self._failed.items() if one == sender)
        return proven >= _ENOUGH_RECEIVERS
