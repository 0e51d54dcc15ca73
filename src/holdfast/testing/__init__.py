"""For tests, benchmarks and demos: jobs of real processes, and groups without a coordinator."""
