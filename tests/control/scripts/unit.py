"""A script that forms its replica group, writes the result to a file, and acts as its second argument says.

The file is named after the worker. The actions:
`wait`: wait to be killed.
`meet`: local rank 0 waits to be killed. The others wait for it in a collective, and raise the error of that.
`keep`: like `meet`, but the others report the error first, as a session does that keeps its state.
`raise`: local rank 0 raises an error on request.
`linger`: like `raise`, but only its groups end, not its process.
`absent`: worker 1 does not come the first time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

import holdfast
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.protocol.layouts.proposals import Proposal
from holdfast.protocol.messages.worker import Raised, ScriptError
from holdfast.runtime.groups.communicator import CollectiveLeftError, Communicator


def gathered(group: Communicator, value: float) -> torch.Tensor:
    """Return the value of each member."""
    values = torch.empty(group.size)
    group.wait(group.start_all_gather(values, torch.tensor([value])))
    return values


def linger(groups: list[Communicator]) -> None:
    """Retire the groups once the error has been reported, and stay."""
    threading.main_thread().join()
    for group in groups:
        group.retire()
    time.sleep(600)


folder, what, shard, tensor = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings = WorkerSettings.from_environment(os.environ)
assert settings is not None
if what == "absent" and settings.local_rank == 1:
    try:
        (folder / "was-absent").touch(exist_ok=False)
        time.sleep(600)
    except FileExistsError:
        pass
if what == "differ":
    shard, tensor = (1, 2) if settings.local_rank == 1 else (2, 1)
job = holdfast.init(layout=holdfast.Layout(shard=shard, tensor=tensor))
unit, link = job._joined.replica_group, job._link
assert unit is not None
assert link is not None
sums: dict[str, float] = {}
for name, group in unit.groups.items():
    sums[name] = gathered(group, 2.0**unit.local_rank).sum().item()
agreed = unit.proposals.agree(Proposal(1, 1, 0), lambda: True)
report = {"worker": settings.worker, "pid": os.getpid(), "unit": unit.name, "place": unit.local_rank, "sums": sums}
part = folder / f"{os.getpid()}.part"
part.write_text(json.dumps({**report, "agreed": agreed}))
part.rename(folder / f"{os.getpid()}.json")
try:
    if what in ("meet", "keep", "raise", "linger") and unit.local_rank:
        (folder / f"{os.getpid()}.waits").touch()
        gathered(unit.groups["shard"], 1.0)
    while what in ("raise", "linger") and not (folder / "go").exists():
        time.sleep(0.005)
    if what in ("raise", "linger"):
        (folder / "go").unlink()
        if what == "linger":
            threading.Thread(target=linger, args=(list(unit.groups.values()),)).start()
        raise ValueError("place 0 has raised")
except CollectiveLeftError as error:
    if what == "keep":
        error_report = ScriptError(place="CollectiveLeftError")
        link.send(Raised(worker=settings.worker, generation=1, detail=str(error), error=error_report, exit_code=1))
    else:
        raise
time.sleep(600)
