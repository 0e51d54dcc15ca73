"""Where a job's time went: its ledger, from events alone."""
