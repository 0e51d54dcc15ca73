"""Models and trainers of other libraries, each an optional extra; they use of holdfast what its users use."""
