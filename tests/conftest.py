"""Settings of the whole test suite."""

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

# Property tests check results, not speed, so a busy machine must not fail them.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# With half a million imported objects, frequent garbage collection takes 5 % of the tests' time, and 20 % of the
# imports'.
gc.set_threshold(50_000, 20, 20)

# The commands store state about jobs here, not in the user's home, and it is removed after the tests.
_STATE = tempfile.TemporaryDirectory(prefix="holdfast-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

#: The zygotes that all xdist processes share, by their preloaded modules.
_ZYGOTES = "holdfast_zygotes"


def pytest_configure(config: pytest.Config) -> None:
    """End all processes that tests started with the test run, even if it is interrupted or killed."""
    if (guard := start_guard()) is not None:
        config.add_cleanup(lambda: end_guard(guard))
    _print_stack_at_exit()


def _print_stack_at_exit() -> None:
    """Print the stacks of all threads if code under test ends this process with `os._exit`."""
    stderr, me, end = os.dup(2), os.getpid(), os._exit

    def exit_with_stack(code: int) -> NoReturn:
        if os.getpid() == me:  # This is not the case in processes that multiprocessing has forked.
            faulthandler.dump_traceback(file=stderr)
        end(code)

    os._exit = exit_with_stack


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Run tests of a file that share a fixture in one xdist process, so that the fixture is created once."""
    if config.getoption("dist") != "loadgroup":
        return None
    from whole_files import WholeFiles

    return WholeFiles(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Share one zygote of each kind among all xdist processes; it ends with the process that started them."""
    from warm_start import COMMANDS, PRELOAD, zygote  # Import here, because mutants are tested without these modules.

    config = node.config
    if not hasattr(config, _ZYGOTES):
        stack = ExitStack()
        kinds = {"torch": PRELOAD, "commands": COMMANDS}
        setattr(config, _ZYGOTES, {kind: stack.enter_context(zygote(names)) for kind, names in kinds.items()})
        config.add_cleanup(stack.close)
    node.workerinput[_ZYGOTES] = getattr(config, _ZYGOTES)


@pytest.fixture(scope="session")
def warm_torch(request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a zygote that has imported torch once for all tests, which saves much time."""
    from warm_start import PRELOAD

    yield from _zygote(request, "torch", PRELOAD)


@pytest.fixture(scope="session")
def warm_commands(request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a zygote with the imports of `holdfast run` and its processes, but without torch."""
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
