"""What the places of a unit share: the page on which they agree on what all of them compute (docs/layouts.md)."""
