"""The checks, one module each, with a function `run(options, figures)` that adds its figures as it measures them."""
