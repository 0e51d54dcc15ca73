"""From one placement to the next: which node takes which role, and the transfers."""
