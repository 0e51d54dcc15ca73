"""The ledger of a job's time, computed from its events alone."""
