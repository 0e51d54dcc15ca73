"""Fault schedules by number: generating, running and shrinking them."""
