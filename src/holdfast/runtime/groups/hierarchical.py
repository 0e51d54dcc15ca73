"""The group of a generation as levels of small groups: within a node first, then between nodes, a few at a time.

A rank has connections to about fan-out times log(ranks) other ranks instead of all. Sums go level by level (see
`Communicator.groups`). Only a job that sends tokens from any rank to any other also has a group of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from holdfast.control.link.progress_page import ProgressSlot
from holdfast.planning.levels import Levels
from holdfast.runtime.groups.communicator import Communicator, HaltCheck, Pending
from holdfast.runtime.groups.concurrent_build import build_concurrently
from holdfast.runtime.groups.rendezvous import Board
from holdfast.runtime.groups.severing import GroupSockets

#: Builds a group of a generation, given its name and its ranks.
BuildGroup = Callable[[str, Sequence[int]], Communicator]


class HierarchicalCommunicator(Communicator):
    """A communicator with one group per level, and perhaps one of all ranks. Made by `build_hierarchical`."""

    def __init__(
        self,
        groups: Sequence[Communicator],
        all_ranks: Communicator | None,
        *,
        owners: Sequence[int],
        rank: int,
        size: int,
        generation: int,
        halt: threading.Event | HaltCheck | None,
    ) -> None:
        """Take ownership of groups. For the other arguments see the base class.

        Args:
            groups: this rank's groups, lowest level first.
            all_ranks: the group of all ranks, if there is one.
        """
        super().__init__(rank=rank, size=size, generation=generation, halt=halt)
        self.device = groups[0].device
        self._groups = tuple(groups)
        self._owners = tuple(owners)
        self._all_ranks = all_ranks

    @property
    def owners(self) -> tuple[int, ...]:
        return self._owners

    @property
    def groups(self) -> tuple[Communicator, ...]:
        return self._groups

    def start_all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Pending:
        return self._require_full_group().start_all_to_all(output, input, output_splits, input_splits)

    def start_all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._require_full_group().start_all_gather(output, input)

    def wait(self, pending: Pending) -> None:
        self._require_full_group().wait(pending)

    def report_waits_to(self, progress: ProgressSlot) -> None:
        for group in self._all_groups():
            group.report_waits_to(progress)

    @property
    def sockets(self) -> tuple[GroupSockets, ...]:
        return tuple(sockets for group in self._all_groups() for sockets in group.sockets)

    def sever(self) -> None:
        for group in self._all_groups():
            group.sever()

    def retire(self, *, sever: bool = True) -> None:
        for group in self._all_groups():
            group.retire(sever=sever)

    def _all_groups(self) -> tuple[Communicator, ...]:
        return self._groups if self._all_ranks is None else (*self._groups, self._all_ranks)

    def _require_full_group(self) -> Communicator:
        """Return the group of all ranks.

        Raises:
            RuntimeError: it was not built.
        """
        if self._all_ranks is None:
            raise RuntimeError(f"broken invariant: generation {self.generation} has no group of all {self.size} ranks")
        return self._all_ranks


def build_hierarchical(
    build: BuildGroup,
    board: Board,
    levels: Levels,
    rank: int,
    size: int,
    *,
    any_to_any: bool,
    halt: threading.Event | HaltCheck | None,
) -> HierarchicalCommunicator:
    """Build all groups of a rank concurrently: one for each of its levels, and one of all ranks if `any_to_any`.
    Blocks.

    If one group fails, its error is raised at once, and all other groups are retired, as soon as they are built.

    Args:
        build: builds one group from its name and its ranks; blocks.
        board: the generation's rendezvous, over which they are built; it is told how many groups there are.
        levels: the ranks of this rank's group on each level.
        rank, size: this worker's rank, and the number of all ranks.
        any_to_any: whether operations between any two ranks are needed. If False, only the result's `groups` are
            usable; its own operations raise RuntimeError.
    """
    builds: list[tuple[str, Sequence[int]]] = [
        (f"{level}-{group[0]}/", group) for level, group in enumerate(levels.groups)
    ]
    if any_to_any:
        builds.append(("all/", range(size)))
    board.expect_keys(len(builds))
    built = build_concurrently([partial(build, name, members) for name, members in builds])
    return HierarchicalCommunicator(
        built[: len(levels.groups)],
        built[-1] if any_to_any else None,
        owners=levels.owners,
        rank=rank,
        size=size,
        generation=board.generation,
        halt=halt,
    )
