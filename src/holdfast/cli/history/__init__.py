"""Commands about the past of a job, such as report and explain."""
