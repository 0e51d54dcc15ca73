"""Another layout for another number of nodes: which one, when it pays to change, and the change itself."""
