"""The persistent tier: state on disk, saved in the background, read without running anything it says."""
