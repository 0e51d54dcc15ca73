"""Where experts live: loads, placements, and what each worker holds of them."""
