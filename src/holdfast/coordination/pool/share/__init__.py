"""How many nodes each job of a pool is to have: policies behind one interface, which nodes is another question."""
