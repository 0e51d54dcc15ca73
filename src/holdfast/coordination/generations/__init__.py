"""From one generation to the next: stopping, deciding, planning, and swapping at a step boundary."""
