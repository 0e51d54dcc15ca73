"""Whole pools over months: jobs that share nodes, by ours and others' ways to live through failures."""
