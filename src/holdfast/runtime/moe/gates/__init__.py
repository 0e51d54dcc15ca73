"""Which experts each token goes to, and with which weight: by a gate, or by a record."""
