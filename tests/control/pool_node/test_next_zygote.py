"""A node's zygotes: each imports modules once, serves one grant, and is gone before the next grant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A node: each scenario runs in its own process, which becomes the parent of orphaned processes.
_NODE = """
import asyncio, contextlib, os, signal, socket, sys
from pathlib import Path
from holdfast.control import process_template
from holdfast.control.agent.zygote_client import ZygoteClient
from holdfast.control.pool_node import next_zygote
from holdfast.control.pool_node.descendants import adopt_orphans, find_descendants, end_all_below
from holdfast.control.pool_node.next_zygote import NextZygote
from holdfast.control.pool_node.settings import PoolNodeSettings
from holdfast.control.processes import ChildProcess

folder = Path(sys.argv[1])
imports, heavy, script, gate = folder / "imports", folder / "heavy.py", folder / "script.py", folder / "gate"
settings = PoolNodeSettings(
    pool="", token="", node="n", folder=str(folder), environment=dict(os.environ), preload=("heavy",)
)
zygote = NextZygote(settings)

async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)

def import_count():
    return imports.read_text().count("x") if imports.exists() else 0

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

async def grant(ends=True):
    "Start a process of a grant from its zygote; return its pid and the zygote's."
    client = await ZygoteClient.connect(zygote.path, lambda pid, code: None, lambda: None)
    pid = await client.fork(script=str(script), args=(), env={}, cwd=str(folder), output=str(folder / "output"))
    zygote_pid = parent(pid)
    # Processes between them end immediately, as for all of a grant.
    await until(lambda: parent(zygote_pid) == os.getpid())
    assert zygote_pid not in zygote.template_pids
    if ends:
        await end()
        assert not any(os.path.exists(f"/proc/{one}") for one in (pid, zygote_pid))
    return pid, zygote_pid

async def end():
    await zygote.end()
    await end_all_below(lambda: zygote.template_pids)
    assert set(find_descendants()) == set(zygote.template_pids)

async def grants_follow_each_other():
    found = set()
    for _ in range(3):
        zygote.prepare()
        found |= set(await grant())
    assert len(found) == 6
    assert import_count() == 1, "the module must be imported once"

async def grants_draw_different_random_numbers():
    heavy.write_text(heavy.read_text() + "import numpy.random\\n")
    script.write_text("import sys, time, numpy\\nprint(numpy.random.rand(), flush=True)\\ntime.sleep(1000)")
    for grants in range(1, 4):
        zygote.prepare()
        await grant(ends=False)
        await until(lambda: (folder / "output").exists() and (folder / "output").read_text().count("\\n") == grants)
        await end()
    assert len(set((folder / "output").read_text().split())) == 3
    assert import_count() == 1

async def an_imported_module_changes():
    zygote.prepare()
    await grant()
    (before,) = zygote.template_pids
    heavy.write_text(heavy.read_text() + "# another\\n")
    zygote.prepare()
    await grant()
    assert zygote.template_pids != (before,)
    assert import_count() == 2

async def a_package_is_installed():
    zygote.prepare()
    await grant()
    (before,) = zygote.template_pids
    (folder / "more.pth").write_text("/somewhere")
    zygote.prepare()
    await grant()
    assert zygote.template_pids != (before,)
    (before,) = zygote.template_pids
    (folder / "log").write_text("no module's")
    zygote.prepare()
    await grant()
    assert zygote.template_pids == (before,)

async def the_template_dies():
    zygote.prepare()
    pid, zygote_pid = await grant(ends=False)
    (before,) = zygote.template_pids
    os.kill(before, signal.SIGKILL)
    await until(lambda: not zygote.template_pids)
    assert os.path.exists(f"/proc/{pid}"), "processes that it forked must survive it"
    await end()
    assert not os.path.exists(f"/proc/{zygote_pid}")
    zygote.prepare()
    await grant()
    assert import_count() == 2

async def the_template_is_stopped():
    zygote.prepare()
    await grant()
    os.kill(zygote.template_pids[0], signal.SIGSTOP)
    zygote.prepare()
    await grant()
    assert import_count() == 1

async def the_template_is_stopped_while_it_imports():
    gate.unlink()
    zygote.prepare()
    os.kill(zygote.template_pids[0], signal.SIGSTOP)
    gate.touch()
    request = asyncio.ensure_future(grant())
    await until(lambda: (zygote.check(), request.done())[1])
    await request
    assert import_count() == 1

async def the_template_does_not_answer():
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    its.send(process_template.READY)
    next_zygote._FORK_TIMEOUT_S = 0.0
    mute = ChildProcess(["sleep", "1000"], stdin=its.fileno())
    its.close()
    next_zygote.start_template = lambda *_: (mute, ours)
    zygote.prepare()
    client = await ZygoteClient.connect(zygote.path, lambda pid, code: None, lambda: None)
    request = client.fork(script=str(script), args=(), env={}, cwd=str(folder), output=str(folder / "output"))
    request = asyncio.ensure_future(request)
    await until(lambda: (zygote.check(), request.done())[1])
    assert isinstance(request.exception(), ConnectionError), request
    assert not zygote.template_pids
    with contextlib.suppress(ConnectionRefusedError):
        await ZygoteClient.connect(zygote.path, lambda pid, code: None, lambda: None)
        raise AssertionError("no agent may connect here: the job's agent must have its own zygote")
    await end()

async def a_grant_ends_before_the_import_ends():
    gate.unlink()
    zygote.prepare()
    client = await ZygoteClient.connect(zygote.path, lambda pid, code: None, lambda: None)
    request = asyncio.ensure_future(
        client.fork(script=str(script), args=(), env={}, cwd=str(folder), output=str(folder / "of the first"))
    )
    await end()
    assert isinstance(await asyncio.wait_for(asyncio.gather(request, return_exceptions=True), 30), list)
    assert isinstance(request.exception(), ConnectionError), request
    gate.touch()
    zygote.prepare()
    await grant()
    assert not (folder / "of the first").exists(), "a request of an ended grant must have no effect"
    assert import_count() == 1

async def the_import_fails():
    heavy.write_text("import os\\nos._exit(3)")
    zygote.prepare()
    await until(lambda: not zygote.template_pids)
    with contextlib.suppress(ConnectionRefusedError):
        await ZygoteClient.connect(zygote.path, lambda pid, code: None, lambda: None)
        raise AssertionError("no agent may connect here: the job's agent must have its own zygote")
    await end()

async def main(scenario):
    await scenario()
    await zygote.close()
    assert not find_descendants()
    assert not list(folder.glob("next-*"))

adopt_orphans()
asyncio.run(asyncio.wait_for(main(globals()[sys.argv[2]]), 60))
"""

_HEAVY = """
import os, time
while not os.path.exists({gate!r}):
    time.sleep(0.005)
with open({imports!r}, "a") as file:
    file.write("x")
"""


@pytest.mark.parametrize(
    "scenario",
    [
        "grants_follow_each_other",
        "grants_draw_different_random_numbers",
        "an_imported_module_changes",
        "a_package_is_installed",
        "the_template_dies",
        "the_template_is_stopped",
        "the_template_is_stopped_while_it_imports",
        "the_template_does_not_answer",
        "a_grant_ends_before_the_import_ends",
        "the_import_fails",
    ],
)
def test_zygotes_are_forked_from_one_process_template(tmp_path: Path, scenario: str) -> None:
    (tmp_path / "gate").touch()
    (tmp_path / "script.py").write_text("import time\ntime.sleep(1000)\n")
    (tmp_path / "heavy.py").write_text(_HEAVY.format(gate=str(tmp_path / "gate"), imports=str(tmp_path / "imports")))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    node = [sys.executable, "-c", _NODE, str(tmp_path), scenario]
    done = subprocess.run(node, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
