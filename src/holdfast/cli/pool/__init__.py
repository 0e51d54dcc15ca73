"""Commands of pools: serving one, handing in jobs, and what is done with those."""
