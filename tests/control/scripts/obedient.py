"""A worker that does as the keys of its orders say, for tests of the processes between it and the coordinator."""

from __future__ import annotations

import os
import queue
import signal
import sys

import msgspec

from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import BadInputError
from holdfast.protocol.messages.orders import Inject, JobDone, Order
from holdfast.protocol.messages.worker import Attach, WorkerMessage


def main() -> None:
    settings = WorkerSettings.from_environment(os.environ)
    assert settings is not None
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
    link = WorkerLink(settings.socket)
    link.start(orders.put, lambda: os._exit(1))
    attach = Attach(
        worker=settings.worker,
        pid=os.getpid(),
        host=settings.host,
        state_port=1,
        config={"script": settings.script_digest},
        global_batch=8,
        micro_batches=4,
    )
    link.send(attach)
    while True:
        order = orders.get()
        if isinstance(order, JobDone):
            break
        if isinstance(order, Inject):
            obey(order, link)
    link.close()
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


def obey(order: Inject, link: WorkerLink) -> None:
    value = bytes.fromhex(order.phase)
    if order.fault == "say":
        link.send(msgspec.msgpack.decode(value, type=WorkerMessage))
    elif order.fault == "exit":
        sys.exit(int(value))
    elif order.fault == "raise":
        raise RuntimeError(value.decode())
    elif order.fault == "bad-input":
        raise BadInputError(value.decode())
    elif order.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order.fault == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
