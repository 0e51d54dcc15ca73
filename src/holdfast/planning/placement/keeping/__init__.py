"""Placements that start from the experts that nodes hold already, so that few experts move."""
