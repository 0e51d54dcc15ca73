"""Parts of snapshots: as files that a worker shares with its agent, and as what an agent gives out to others."""
