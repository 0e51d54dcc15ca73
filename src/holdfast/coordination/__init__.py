"""Every decision about a job, as state machines without I/O: inputs and the time go in, instructions come out.

There are four machines: `Coordinator` (`job`), `AgentMachine` (`agent`), `WorkerMachine` (`worker`) and `Pool`
(`pool`). A shell in `control`, in `runtime` or in tests/simulation owns the sockets and clocks. It feeds its machine,
and executes the returned instructions in order. For the coordinator:

    machine = Coordinator(config, tail, record)
    execute(machine.start(now, url, pid))
    execute(machine.handle(Received(connection, hello), now))  # a message of an agent
    execute(machine.handle(Disconnected(connection), now))
    execute(machine.handle(Tick(), now))                       # at least every `tick_s`

Within one call all durable changes go into one `Persist`, before every message and event that depends on it. So a crash
at any write leaves the state before the call, or the state after it. The same inputs give the same instructions:
failures are reproduced by replaying a schedule. docs/protocol.md describes the protocol.
"""
