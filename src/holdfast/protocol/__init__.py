"""The types of all data that crosses a socket or lies on a disk. No decisions, no I/O.

All structs are frozen and encoded with msgspec. Messages, records and events have fixed tags and bounded fields: bytes
that do not fit their type never get past the decoder (`MALFORMED` in `names.py`). `PROTOCOL` counts incompatible
changes of the messages.

- `job_spec.py`: the job file, `JobSpec`.
- `messages`: messages between coordinator, agents and workers.
- `plan.py`, `commit.py`: the plan of a generation, and the result of a step.
- `record.py`: the coordinator's durable state, `Record`.
- `events.py`: the journal, a contract with other tools (docs/events.md).
- `checkpoints`, `layouts`, `pool`: files of checkpoints, layouts of a replica, messages of a pool.

Formats of earlier versions must stay readable: tests/golden keeps an example of each.

Example:

    data = msgspec.msgpack.encode(Heartbeat(generation=3, applied=(120,)))
    message = msgspec.msgpack.decode(data, type=AgentMessage)
"""
