"""What the places of a unit do together, and how they agree on it (docs/layouts.md); who is alone is a unit of one."""
