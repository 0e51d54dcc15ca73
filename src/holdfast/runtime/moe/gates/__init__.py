"""Gates and fixed routings: from router logits, or a recording, to each token's experts and weights."""
