"""What happened: the event journal, metrics, the goodput ledger."""
