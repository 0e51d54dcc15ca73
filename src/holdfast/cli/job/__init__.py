"""Commands for jobs: run, watch, act, report."""
