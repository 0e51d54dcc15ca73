"""The checks, one module each, with a function `run(options, figures)` that fills in the figures as it goes."""
