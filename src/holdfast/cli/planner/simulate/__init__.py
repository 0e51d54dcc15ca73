"""`holdfast simulate`: forecast the cost of failures for a job of any size."""
