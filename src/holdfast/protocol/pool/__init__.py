"""What a pool of nodes keeps, says and writes down."""
