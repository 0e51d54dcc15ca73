"""Fault plans by what they try: each a function of a seed."""
