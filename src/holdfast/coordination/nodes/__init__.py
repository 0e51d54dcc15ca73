"""Who is there: letting nodes in, waiting for those that are away, and what their failures lead to."""
