"""What runs inside a worker, and the only place that knows torch."""
