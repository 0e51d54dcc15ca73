"""The pool's process: the shell around its machine, one coordinator for each of its jobs, what it answers."""
