"""What computes the rows of tokens that have come to this rank's experts, and how long that takes."""
