"""The outermost frame of a worker process: runs the user's script and says how it ended."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import sys
import threading
import traceback
from types import TracebackType

from holdfast.control.link.exit_after_exception import ScriptErrorHook
from holdfast.control.link.framing import Crashed
from holdfast.control.link.training_guard import TrainingGuard
from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.environment import WORKER
from holdfast.errors import (
    EXIT_BAD_INPUT,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    BadInputError,
    HoldfastError,
    StepUseError,
    TracebackElsewhereError,
)
from holdfast.protocol.failures import FailureKind
from holdfast.protocol.messages.worker import ScriptError

_DETAIL_CHARACTERS = 2000
_TRACEBACK_CHARACTERS = 6000
_HEARD_WITHIN_S = 5.0
_STDERR = 2
#: what torch says to a script that was written for torchrun
_NO_GROUP = ("Default process group has not been initialized", "environment variable RANK expected")
_WITHOUT_GROUP = (
    "there is no process group to join, for holdfast reduces the gradients itself: leave out "
    "init_process_group() and wrappers such as DistributedDataParallel, and give the plain module to job.protect(...)"
)
#: what torch says where the script makes a group although `holdfast.init(layout=...)` has
_GROUP_AGAIN = "trying to initialize the default process group twice"
_ONE_GROUP = (
    "the script calls init_process_group(), and torch has a default process group already: leave it out, "
    "holdfast.init(layout=...) has made the layout's groups for the script"
)


def run_script(script: str, module: str = "") -> int:
    """Run a script as `__main__`, and return the exit code, as `sys.exit` gives it. No exception passes.

    An error is reported to the agent and printed; if all workers find it, only if the agent does not receive it. After
    an end without error, the state of a loop that was left early is saved. In a worker, training that holdfast does not
    control is refused, and a crash in native code prints all stacks.

    Args:
        script: path of the script.
        module: the name under which it is found as a module, or "" to run it as a file.
    """
    guard = TrainingGuard()
    if WORKER in os.environ:
        guard.install()
        # A crash in native code (SIGSEGV, SIGABRT, ...) prints the stack of each thread: nothing else tells its place.
        faulthandler.enable(file=_STDERR)
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        _save_left_loop()
    except BaseException as error:  # noqa: BLE001
        # The last frame of the process: where Python itself would print a traceback and exit with 1 (130 after Ctrl-C).
        session = ScriptErrorHook.find_installed()
        if session is not None:
            # First, because making a traceback may take longer than the limit of the script's activity.
            session.mark_ending()
        if _GROUP_AGAIN in str(error):
            return _on_holdfast_error(BadInputError(_ONE_GROUP + _describe_place(error, script)), script)
        if any(words in str(error) for words in _NO_GROUP):
            return _on_missing_group(error, script)
        if isinstance(error, HoldfastError):
            return _on_holdfast_error(error, script)
        if isinstance(error, SystemExit):
            return _on_system_exit(error, script)
        return _on_exception(error, script)
    finally:
        guard.remove()
    return 0


def _save_left_loop() -> None:
    """Save the state of a script that left its loop early (`break`) and ended without error, if it has a session."""
    session = ScriptErrorHook.find_installed()
    if session is not None:
        session.save()


def _on_holdfast_error(error: HoldfastError, script: str) -> int:
    """Report an error of holdfast to the agent, and return its exit code.

    After bad input no state is kept, and the error is printed only if the agent has not received it, because all
    workers find the same. Other errors are always printed. Misuse of steps is reported as final: it ends the job.
    """
    bad_input = error.exit_code == EXIT_BAD_INPUT
    kind = FailureKind.PROCESS_EXIT if bad_input else FailureKind.EXCEPTION
    misused = isinstance(error, StepUseError)
    detail = f"{error}{_describe_place(error, script)}" if misused or not bad_input else str(error)
    if bad_input:
        told = _report(kind, detail, error.exit_code, final=misused)
    else:
        told = _report_and_keep(kind, detail, error.exit_code, _to_script_error(error, script))
    # All workers find the same error in a script's settings. The coordinator or the agent prints it once.
    if not (told and bad_input):
        print(f"holdfast: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _on_missing_group(error: BaseException, script: str) -> int:
    """Report as final that a script for torchrun needs a process group, so that the job ends; return `EXIT_BAD_INPUT`.

    It is printed here, with the traceback, only if the agent does not receive it: all workers find the same.
    """
    error.__traceback__ = _drop_outer_frames(error.__traceback__, script)
    what = "".join(traceback.format_exception_only(error)).strip()
    detail = f"{what}{_describe_place(error, script)}: {_WITHOUT_GROUP}"
    raised = _to_script_error(error, script)
    if not _report_and_keep(FailureKind.PROCESS_EXIT, detail, EXIT_BAD_INPUT, raised, final=True):
        print(f"{raised.traceback}holdfast: {_WITHOUT_GROUP}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


def _on_system_exit(error: SystemExit, script: str) -> int:
    """Return the code of `sys.exit`. Report a code other than 0 as final to the agent; after 0, save the state."""
    code = _exit_code(error)
    if code != EXIT_DONE:
        detail = f"the script called sys.exit({code}){_describe_place(error, script)}"
        _report_and_keep(FailureKind.PROCESS_EXIT, detail, code, _to_script_error(error, script), final=True)
    else:
        _save_left_loop()
    return code


def _on_exception(error: BaseException, script: str) -> int:
    """Print the script's part of the traceback, report the error, and return 1, or `EXIT_INTERRUPTED` after Ctrl-C."""
    error.__traceback__ = _drop_outer_frames(error.__traceback__, script)
    traceback.print_exception(error)
    sys.stderr.flush()
    what = "".join(traceback.format_exception_only(error)).strip()
    code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else EXIT_FAILED
    _report_and_keep(
        FailureKind.EXCEPTION, f"{what}{_describe_place(error, script)}", code, _to_script_error(error, script)
    )
    return code


def _exit_code(error: SystemExit) -> int:
    """Return the exit code of `sys.exit(...)`, as the interpreter computes it. Text is printed, with code 1."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return EXIT_FAILED


def _drop_outer_frames(trace: TracebackType | None, script: str) -> TracebackType | None:
    """Return a traceback from the script's first frame on, or all of it if the script has none (a syntax error)."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename != script:
        part = part.tb_next
    return part or trace


def _describe_place(error: BaseException, script: str) -> str:
    """Return the place of an error in the user's own code, as in " (train.py, line 12)", or "" if no frame is there.

    It is the last frame in the script's folder (with `script` "", in any folder) outside of packages and holdfast. For
    an error in a child process, the child's frames count, so that all nodes name the same place.
    """
    folder = os.path.dirname(os.path.abspath(script)) if script else ""
    packages = (f"{os.sep}site-packages{os.sep}", f"{os.sep}holdfast{os.sep}")
    frames = [(os.path.abspath(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error.__cause__, TracebackElsewhereError):
        frames += [(os.path.abspath(file), line) for file, line in error.__cause__.frames]
    own = [frame for frame in frames if frame[0].startswith(folder) and not any(part in frame[0] for part in packages)]
    return f" ({os.path.basename(own[-1][0])}, line {own[-1][1]})" if own else ""


def _to_script_error(error: BaseException, script: str) -> ScriptError:
    """Return an exception as a message: its type, its place, and the last part of its traceback."""
    place = _describe_place(error, script) or _describe_place(error, "")
    trace = "".join(traceback.format_exception(error))
    return ScriptError(place=f"{type(error).__name__}{place}", traceback=trace[-_TRACEBACK_CHARACTERS:])


def _report_and_keep(
    kind: FailureKind, detail: str, exit_code: int, error: ScriptError, *, final: bool = False
) -> bool:
    """Report an error to the agent, and return whether the report arrived.

    If a session trains in this process, this first keeps its state for the other workers, and returns only when the
    state is not needed.

    Args:
        kind: the kind of the failure.
        detail: its description; only the end of a long one is sent.
        exit_code: of this process.
        error: type, place and traceback of the exception.
        final: whether another process would end the same way, so that the job ends.
    """
    session, settings = ScriptErrorHook.find_installed(), WorkerSettings.from_environment(os.environ)
    if session is not None and settings is not None:
        error = session.locate(error)
        crashed = Crashed(
            worker=settings.worker,
            kind=kind,
            detail=detail[-_DETAIL_CHARACTERS:],
            exit_code=exit_code,
            final=final,
            error=error,
        )
        if session.hold_state(crashed):
            return True
    return _report(kind, detail, exit_code, final=final, error=error)


def _report(
    kind: FailureKind, detail: str, exit_code: int, *, final: bool = False, error: ScriptError | None = None
) -> bool:
    """Report an error to the agent over a new connection, and return whether it arrived within 5 s.

    Return False if this process is not a worker or the agent is gone. Arguments as for `_report_and_keep`.
    """
    settings = WorkerSettings.from_environment(os.environ)
    if settings is None:
        return False
    heard = threading.Event()
    with contextlib.suppress(OSError):  # The agent is gone.
        link = WorkerLink(settings.socket)
        link.start(lambda order: None, heard.set)
        detail = detail[-_DETAIL_CHARACTERS:]
        crashed = Crashed(
            worker=settings.worker, kind=kind, detail=detail, exit_code=exit_code, final=final, error=error
        )
        link.send(crashed)
        heard.wait(_HEARD_WITHIN_S)  # the agent hangs up once it knows: it must not learn of our exit before
        link.close()
    return heard.is_set()
