"""How many spares of which kind give the most goodput, in closed form."""
