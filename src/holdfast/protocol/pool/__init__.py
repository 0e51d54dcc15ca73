"""The record, the events and the messages of a pool."""
