"""The coordinator's durable state: one interface, three stores."""
