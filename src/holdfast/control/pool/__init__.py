"""The pool server: the shell of its state machine, and one coordinator for each job."""
