"""From a failure to the job's next state: who is given up, whose fault it was, and how a job ends."""
