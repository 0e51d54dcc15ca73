"""When a pool's nodes are divided anew, by what was measured of its jobs; plans made before they are needed."""
