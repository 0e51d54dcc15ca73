"""The parts of every server: port, connection limits, web server, tokens, transactions, stored record."""
