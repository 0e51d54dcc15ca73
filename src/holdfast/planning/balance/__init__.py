"""How evenly a placement gives the nodes work, and what evens it out."""
