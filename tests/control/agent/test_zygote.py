"""The zygote: it forks workers that behave like cold starts, and ends when its owners end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import DEADLINE, alive

from holdfast.control.agent.zygote import remove
from holdfast.control.agent.zygote_client import ZygoteClient, ZygoteLostError
from holdfast.control.link.forking import Fork, start_zygote
from holdfast.control.link.framing import encode_frame
from holdfast.control.processes import ChildProcess


class Owner:
    """A client that requests workers from a zygote."""

    def __init__(self) -> None:
        self.exits: dict[int, int] = {}
        self.lost = asyncio.Event()
        self.changed = asyncio.Event()

    def on_exit(self, pid: int, code: int) -> None:
        self.exits[pid] = code
        self.changed.set()

    async def exit_of(self, pid: int) -> int:
        async with asyncio.timeout(DEADLINE):
            while pid not in self.exits:
                self.changed.clear()
                await self.changed.wait()
        return self.exits[pid]


Story = Callable[[ZygoteClient, Owner, ChildProcess, Path], Awaitable[None]]


def play(folder: Path, story: Story, preload: tuple[str, ...] = ()) -> None:
    async def run() -> None:
        path = str(folder / "zygote.sock")
        zygote = start_zygote(path, environment=dict(os.environ), preload=preload)
        try:
            owner = Owner()
            client = await ZygoteClient.connect(path, owner.on_exit, owner.lost.set)
            await asyncio.wait_for(story(client, owner, zygote, folder), DEADLINE)
            client.close()
        finally:
            zygote.send_signal(signal.SIGKILL)
            zygote.reap()

    asyncio.run(run())


def script_of(folder: Path, code: str) -> Path:
    """Write a script under a unique name, because an earlier worker may still read another one."""
    script = folder / f"script-{zlib.crc32(code.encode()):08x}.py"
    if not script.exists():
        script.write_text(code)
    return script


async def fork(client: ZygoteClient, folder: Path, code: str, *args: str, env: dict[str, str] | None = None) -> int:
    script = script_of(folder, code)
    return await client.fork(
        script=str(script), args=args, env=env or {}, cwd=str(folder), output=str(folder / "output")
    )


FACTS = """
import json, os, signal, sys, threading
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "variable": os.environ["VARIABLE"],
    "group": os.getpgid(0) == os.getpid(), "threads": threading.active_count(), "stdin": os.read(0, 1).decode(),
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
}))
"""


def test_a_zygote_ends_if_its_owner_is_killed_during_imports(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(f"import os, time\nos.mkfifo({str(tmp_path / 'there')!r})\ntime.sleep(3600)\n")
    code = (
        "import os, sys, time\nfrom holdfast.control.link.forking import start_zygote\n"
        "zygote = start_zygote(sys.argv[1], environment=dict(os.environ), preload=('endless',))\n"
        "print(zygote.pid, flush=True)\ntime.sleep(3600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "zygote.sock")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    deadline = time.monotonic() + DEADLINE
    try:
        while not (tmp_path / "there").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    while alive(pid):
        assert time.monotonic() < deadline, "the zygote must continue to import"
        time.sleep(0.01)


def test_a_forked_worker_behaves_like_a_cold_start(tmp_path: Path) -> None:
    import json

    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        # This worker leaves descriptors that the next one could inherit.
        first = await fork(client, folder, "import time; time.sleep(1000)")
        pid = await fork(client, folder, FACTS, "--flag", "a b", env={"VARIABLE": "value"})
        assert await owner.exit_of(pid) == 0
        facts = json.loads((folder / "output").read_text())
        descriptors = facts.pop("descriptors")
        # Descriptor 3 belongs to the listing itself.
        assert [number for number in descriptors if number > 2] in ([], [3])
        assert facts == {
            "name": "__main__",
            "argv": [str(script_of(folder, FACTS)), "--flag", "a b"],
            "path": str(folder),
            "cwd": str(folder),
            "variable": "value",
            "group": True,
            "threads": 1,
            "stdin": "",
            "term": True,
            "int": True,
        }
        os.kill(first, signal.SIGKILL)
        assert await owner.exit_of(first) == -signal.SIGKILL

    play(tmp_path, story)


def test_forked_workers_have_different_random_seeds(tmp_path: Path) -> None:
    """The generators of preloaded modules get a new seed in each child, as in a cold start."""
    code = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"

    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        drawn: list[list[str]] = []
        for _ in range(2):
            assert await owner.exit_of(await fork(client, folder, code)) == 0
            drawn.append((folder / "output").read_text().splitlines()[-1].split())
        assert all(one != other for one, other in zip(*drawn, strict=True)), drawn

    play(tmp_path, story, ("torch", "numpy"))


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('sorry')", 1, "sorry\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
        ("import atexit; atexit.register(print, 'bye')", 0, "bye\n"),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", 0, "late\n"),
        ("print('no newline', end='')", 0, "no newline"),
        ("from holdfast.errors import BadInputError\nraise BadInputError('7 is odd')", 2, "holdfast: 7 is odd\n"),
        ("from holdfast.errors import JobFailedError\nraise JobFailedError('lost')", 1, "holdfast: lost\n"),
    ],
)
def test_exit_codes_and_output_match_a_cold_start(tmp_path: Path, code: str, exit_code: int, words: str) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        assert await owner.exit_of(await fork(client, folder, code)) == exit_code
        assert (folder / "output").read_text() == words

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("code", "lines", "exit_code"),
    [
        ("def f():\n    1 / 0\nf()\n", (3, 2), 1),
        ("def f():\n    raise KeyboardInterrupt\nf()\n", (3, 2), 130),
        ("x = = 1\n", (1,), 1),
    ],
)
def test_a_traceback_begins_with_the_script(tmp_path: Path, code: str, lines: tuple[int, ...], exit_code: int) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        assert await owner.exit_of(await fork(client, folder, code)) == exit_code
        output = (folder / "output").read_text()
        for line in lines:
            assert f'{script_of(folder, code).name}", line {line}' in output
        if len(lines) > 1:
            assert "holdfast" not in output

    play(tmp_path, story)


def test_concurrent_fork_requests_each_get_their_own_worker(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        code = "import sys; sys.exit(int(sys.argv[1]))"
        pids = await asyncio.gather(*(fork(client, folder, code, str(number)) for number in range(20)))
        assert [await owner.exit_of(pid) for pid in pids] == list(range(20))

    play(tmp_path, story)


def test_workers_end_with_their_requester_and_other_workers_survive(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        other_owner = Owner()
        path = str(folder / "zygote.sock")
        other = await ZygoteClient.connect(path, other_owner.on_exit, other_owner.lost.set)
        sleep = "import time; time.sleep(1000)"
        mine, stopped = await fork(client, folder, sleep), await fork(other, folder, sleep)
        os.kill(stopped, signal.SIGSTOP)
        other.close()
        while alive(stopped):
            await asyncio.sleep(0.01)
        assert alive(mine)
        os.kill(mine, signal.SIGKILL)
        assert await owner.exit_of(mine) == -signal.SIGKILL

    play(tmp_path, story)


def test_closing_its_stdin_ends_the_zygote_and_its_workers(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        pid = await fork(client, folder, "import time; time.sleep(1000)")
        assert zygote.stdin is not None
        zygote.stdin.close()
        assert await asyncio.wait_for(zygote.wait(), DEADLINE) == 0
        while alive(pid):
            await asyncio.sleep(0.01)
        await asyncio.wait_for(owner.lost.wait(), DEADLINE)
        with pytest.raises(ZygoteLostError):
            await fork(client, folder, "")

    play(tmp_path, story)


def test_a_pending_request_fails_if_the_zygote_is_killed(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        zygote.send_signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(fork(client, folder, ""))
        await asyncio.sleep(0)
        zygote.send_signal(signal.SIGKILL)
        with pytest.raises(ZygoteLostError):
            await asked

    play(tmp_path, story)


def test_garbage_closes_only_its_own_connection(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\0"):
            reader, writer = await asyncio.open_unix_connection(str(folder / "zygote.sock"))
            writer.write(garbage)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        assert await owner.exit_of(await fork(client, folder, "raise SystemExit(3)")) == 3

    play(tmp_path, story)


def test_a_requester_that_closes_with_an_unread_reply_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        script = str(script_of(folder, "import time; time.sleep(1000)"))
        request = Fork(request=1, script=script, args=(), env={}, cwd=str(folder), output=str(folder / "output"))
        with socket.socket(socket.AF_UNIX) as requester:
            requester.connect(str(folder / "zygote.sock"))
            requester.sendall(encode_frame(request))
            assert select.select([requester], [], [], DEADLINE)[0]
        assert await owner.exit_of(await fork(client, folder, "raise SystemExit(3)")) == 3

    play(tmp_path, story)
    assert capfd.readouterr().err == ""


def test_modules_that_cannot_be_preloaded_are_skipped(tmp_path: Path) -> None:
    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        code = "import sys; sys.exit('json' in sys.modules and 'colorsys' in sys.modules)"
        assert await owner.exit_of(await fork(client, folder, code)) == 1

    play(tmp_path, story, preload=("json", "there.is.no.such.module", "colorsys"))


def test_the_zygote_has_one_thread_and_its_workers_can_train(tmp_path: Path) -> None:
    """Importing everything starts no thread, and a forked worker can train immediately."""
    from holdfast.control.link.forking import PRELOAD

    code = """
import sys
loaded = "torch" in sys.modules
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 64)).sum().backward()
optimizer.step()
sys.exit(0 if loaded else 1)
"""

    async def story(client: ZygoteClient, owner: Owner, zygote: ChildProcess, folder: Path) -> None:
        assert await owner.exit_of(await fork(client, folder, code)) == 0
        assert len(os.listdir(f"/proc/{zygote.pid}/task")) == 1

    play(tmp_path, story, preload=PRELOAD)


def test_a_folder_is_removed_even_if_others_still_write_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    real, times = shutil.rmtree, 0

    def while_another_process_ends(path: Path, *, ignore_errors: bool) -> None:
        nonlocal times
        real(path, ignore_errors=ignore_errors)
        times += 1
        if times < 3:
            (folder / "store").mkdir(parents=True)  # The ending process still writes into the folder.

    monkeypatch.setattr(shutil, "rmtree", while_another_process_ends)
    remove(folder)
    assert times == 3
    assert not folder.exists()


@contextlib.contextmanager
def speaking_through(stdout: Path, stderr: Path) -> Iterator[None]:
    """Redirect descriptors 1 and 2 of this process to files."""
    with contextlib.ExitStack() as stack:
        for number, path in ((1, stdout), (2, stderr)):
            before = os.dup(number)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, number)
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
        yield


def test_a_worker_prints_to_the_streams_of_its_requester(tmp_path: Path) -> None:
    """Several jobs may share a zygote, and a worker's output belongs to its own job."""

    async def story(_client: ZygoteClient, owner: Owner, _zygote: ChildProcess, folder: Path) -> None:
        stdout, stderr = folder / "stdout", folder / "stderr"
        with speaking_through(stdout, stderr):
            other = await ZygoteClient.connect(str(folder / "zygote.sock"), owner.on_exit, owner.lost.set)
        script = script_of(folder, "import sys\nprint('said')\nprint('complained', file=sys.stderr)")
        pid = await other.fork(script=str(script), args=(), env={}, cwd=str(folder), output="")
        assert await owner.exit_of(pid) == 0
        assert (stdout.read_text(), stderr.read_text()) == ("said\n", "complained\n")
        other.close()

    play(tmp_path, story)


def test_the_control_modules_do_not_import_torch() -> None:
    rooms = "holdfast.control.agent.zygote, holdfast.control.agent.node_agent, holdfast.cli"
    code = f"import sys, {rooms}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
