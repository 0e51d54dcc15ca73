"""Commands for pools: serve one, submit jobs, and manage them."""
