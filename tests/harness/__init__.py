"""Jobs, pools and groups of real processes, for tests and benchmarks."""
