"""Everything that is state, and how it gets from one worker to another."""
