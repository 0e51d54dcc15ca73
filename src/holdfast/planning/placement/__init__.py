"""Which node hosts which experts, by several strategies."""
