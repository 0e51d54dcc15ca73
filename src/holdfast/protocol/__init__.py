"""What is said and written: messages, by whom they concern, events and the record. Types only."""
