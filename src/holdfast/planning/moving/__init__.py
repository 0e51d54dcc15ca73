"""From one placement to the next: which node takes which role, and who sends what to whom."""
