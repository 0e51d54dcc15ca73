"""A worker that attaches and ends immediately, as soon as a file exists."""

from __future__ import annotations

import os
import queue
import sys
import time
from pathlib import Path

from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.protocol.messages.orders import Order
from holdfast.protocol.messages.worker import Attach

settings = WorkerSettings.from_environment(os.environ)
assert settings is not None
folder = Path(sys.argv[1])
(folder / "writing").write_text(str(os.getpid()))
(folder / "writing").rename(folder / "pid")
while not (folder / "go").exists():
    time.sleep(0.01)
orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
link = WorkerLink(settings.socket)
link.start(orders.put, lambda: None)
attach = Attach(
    worker=settings.worker,
    pid=os.getpid(),
    host=settings.host,
    state_port=1,
    config={},
    global_batch=8,
    micro_batches=4,
)
link.send(attach)
link.close()
