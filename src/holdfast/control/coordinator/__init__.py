"""A job's coordinator: process, HTTP interface, and the shell of its state machine."""
