"""What serves a machine that decides, a job's or a pool's: port, doorkeeper, agents' connections, turns, a record."""
