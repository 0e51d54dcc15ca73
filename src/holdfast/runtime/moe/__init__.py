"""Mixture-of-Experts layers whose experts live on any ranks, in any number of copies, and move."""
