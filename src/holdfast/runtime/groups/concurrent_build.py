"""Builds several groups concurrently: their addresses are sent together, and no group waits for another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Retirable(Protocol):
    """A process group, or another object of a generation that is retired when the generation ends."""

    def retire(self) -> None: ...


G = TypeVar("G", bound=Retirable)


def build_concurrently(builds: Sequence[Callable[[], G]], name: str = "groups") -> list[G]:
    """Build all, each in its own thread. Blocks.

    Raises the first error at once. Groups that other threads still build are retired.
    """
    return _ConcurrentBuild(builds, name).results()


class _ConcurrentBuild(Generic[G]):
    def __init__(self, builds: Sequence[Callable[[], G]], name: str) -> None:
        self._changed = threading.Condition()
        self._built: list[G | None] = [None] * len(builds)
        self._failure: BaseException | None = None
        for number, build in enumerate(builds):
            arguments = (number, build)
            threading.Thread(target=self._run, args=arguments, name=f"holdfast-{name}-{number}", daemon=True).start()

    def results(self) -> list[G]:
        """Wait until all groups are built, and return them in order. As soon as one fails, retire the groups that are
        built, and raise the first error; the others are retired once they are built.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or None not in self._built)
            built = [group for group in self._built if group is not None]
            if self._failure is None:
                return built
        for group in built:
            group.retire()
        raise self._failure

    def _run(self, number: int, build: Callable[[], G]) -> None:
        """Build one group, store it for `results`, and wake `results`. If another build has failed meanwhile, retire
        the group instead.

        An exception is not raised here: the first one of all builds is stored for `results`.
        """
        try:
            group = build()
        except BaseException as error:  # noqa: BLE001 - raised again by `results`
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            late = self._failure is not None
            if not late:
                self._built[number] = group
            self._changed.notify_all()
        if late:
            group.retire()
