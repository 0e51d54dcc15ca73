"""What fails: the one entrance, whoever saw it; and whose fault it was, where nobody is gone."""
