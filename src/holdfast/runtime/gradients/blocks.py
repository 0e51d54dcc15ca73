"""Into which blocks gradients are cut, wherever a squared norm is added up: pure, for plans of shards need it too."""

from __future__ import annotations

#: Elements whose squares are added up in floating point. Shards begin at multiples of it.
BLOCK = 128
