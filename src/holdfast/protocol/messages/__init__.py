"""What is said: between agent and coordinator, and by a worker and to it."""
