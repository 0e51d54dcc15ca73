"""Messages between workers, agents, coordinator and pool."""
