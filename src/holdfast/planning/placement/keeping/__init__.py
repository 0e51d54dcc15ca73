"""Placements that follow what nodes hold already: so that little moves, and at once where that matters."""
