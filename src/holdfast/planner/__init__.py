"""Planning before a job runs, next to the runtime: spare nodes, fleets over months, experts for inference engines."""
