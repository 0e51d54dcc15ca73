"""Journal, metrics, reports, explanations and audit of a job, all made from its events.

The coordinator appends each event to a `Journal` (`FileJournal` if it has a file) and passes it to `Metrics`, which
Prometheus reads. Everything else is computed from the events alone, read from a file or a running coordinator:

    events = read_events(Path("events.jsonl"))
    make_report(events)           # progress, recoveries and their cost
    explain(events, seq)          # why an event happened (`history`)
    audit_events(events).sound    # whether each sample counted exactly once (`history`)

`TimeLedger` (`accounts`) divides a job's time among causes. `MetricWriter` writes the loss and logged values.
"""
