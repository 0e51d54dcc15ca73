"""The tier in memory: a member's part of the state, copied while it computes, and put together again after a loss."""
