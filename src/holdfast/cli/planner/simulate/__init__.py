"""`holdfast simulate`: what failures will cost a job on a cluster of any size."""
