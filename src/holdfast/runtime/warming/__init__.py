"""Shadow steps: what a worker without a rank goes through so that its first real step takes no longer than others'."""
