"""From router logits, or from a recording, to the experts of each token and their weights."""
