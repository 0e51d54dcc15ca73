"""Fault schedules by number: drawn, run by the thousand, made small."""
