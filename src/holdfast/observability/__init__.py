"""Events of a job as files and numbers: the journal, metrics, reports, explanations, the audit.

The coordinator appends each event to a `Journal` (`FileJournal` if it has a file) and passes it to `Metrics`, which
Prometheus reads. All else is computed from the events alone, from a file or from a running coordinator:

    events = read_events(Path("events.jsonl"))
    make_report(events)           # progress, recoveries and their cost
    explain(events, seq)          # why an event happened (`history`)
    audit_events(events).sound    # whether each sample counted once (`history`)

`TimeLedger` (`accounts`) divides a job's time among its causes. `MetricWriter` writes loss and logged values.
"""
