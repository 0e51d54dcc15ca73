"""What fails: the one entrance, its class, how often what is tried; and whose fault it was, where nobody is gone."""
