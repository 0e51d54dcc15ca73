"""Which nodes each job gets, and moving a pool's jobs into fewer racks and zones."""
