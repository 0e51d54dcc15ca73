"""A worker that does what its orders' keys say: for tests of whoever stands between it and the coordinator."""

from __future__ import annotations

import os
import queue
import signal
import sys

import msgspec

from holdfast.control.link.worker_link import WorkerLink
from holdfast.control.link.worker_settings import WorkerSettings
from holdfast.errors import BadInputError
from holdfast.protocol.messages.orders import JobDone, Order, Posted
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
        if isinstance(order, Posted):
            obey(order, link)
    link.close()
    sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)


def obey(order: Posted, link: WorkerLink) -> None:
    if order.key == "say":
        link.send(msgspec.msgpack.decode(order.value, type=WorkerMessage))
    elif order.key == "exit":
        sys.exit(int(order.value))
    elif order.key == "raise":
        raise RuntimeError(order.value.decode())
    elif order.key == "bad-input":
        raise BadInputError(order.value.decode())
    elif order.key == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif order.key == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    main()
