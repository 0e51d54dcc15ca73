"""Commands about what a job has done, and why: report, explain."""
