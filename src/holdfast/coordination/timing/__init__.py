"""How long things take in this job: step times, what progress reports say, and the lease that follows from them."""
