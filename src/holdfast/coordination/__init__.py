"""Every decision, as sans-I/O state machines: events in, instructions out, time as data."""
