"""Settings of the whole suite."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from end_with_tests import end_guard, start_guard

# Properties are about results, not speed: a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Among half a million objects of what is imported here, looking for garbage takes a twentieth of the tests' time, and a
# fifth of that of importing.
gc.set_threshold(50_000, 20, 20)

# What the commands keep of jobs goes with the tests, and not into the user's home.
_STATE = tempfile.TemporaryDirectory(prefix="holdfast-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

#: the zygotes that all of xdist's processes share, by what they have imported
_ZYGOTES = "holdfast_zygotes"


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start end with the tests, also if these are interrupted or killed."""
    if (guard := start_guard()) is not None:
        config.add_cleanup(lambda: end_guard(guard))
    _print_stack_at_exit()


def _print_stack_at_exit() -> None:
    """Print the stacks of all threads if code under test ends this process with `os._exit`."""
    stderr, me, end = os.dup(2), os.getpid(), os._exit

    def exit_with_stack(code: int) -> NoReturn:
        if os.getpid() == me:  # not one that multiprocessing has forked
            faulthandler.dump_traceback(file=stderr)
        end(code)

    os._exit = exit_with_stack


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Tests of a file that share a fixture run in one of xdist's processes: else each of these makes it for itself."""
    if config.getoption("dist") != "loadgroup":
        return None
    from whole_files import WholeFiles

    return WholeFiles(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """One zygote of each kind serves all of xdist's processes; it ends with the one that has started them."""
    from warm_start import COMMANDS, PRELOAD, zygote  # (not above: mutants are tested without what it imports)

    config = node.config
    if not hasattr(config, _ZYGOTES):
        stack = ExitStack()
        kinds = {"torch": PRELOAD, "commands": COMMANDS}
        setattr(config, _ZYGOTES, {kind: stack.enter_context(zygote(names)) for kind, names in kinds.items()})
        config.add_cleanup(stack.close)
    node.workerinput[_ZYGOTES] = getattr(config, _ZYGOTES)


@pytest.fixture(scope="session")
def warm_torch(request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a zygote with torch; importing that once for all tests takes much off the suite."""
    from warm_start import PRELOAD

    yield from _zygote(request, "torch", PRELOAD)


@pytest.fixture(scope="session")
def warm_commands(request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a zygote that has what `holdfast run` and its processes import, and no torch."""
    from warm_start import COMMANDS

    yield from _zygote(request, "commands", COMMANDS)


def _zygote(request: pytest.FixtureRequest, kind: str, names: Sequence[str]) -> Iterator[str]:
    shared = getattr(request.config, "workerinput", {}).get(_ZYGOTES)
    if shared:
        yield shared[kind]
        return
    from warm_start import zygote

    with zygote(names) as socket_path:
        yield socket_path
