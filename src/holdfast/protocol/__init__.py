"""What is said and written: messages, by whom they concern, events, the record, a checkpoint directory's contents."""
