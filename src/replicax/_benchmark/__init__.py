"""`strategy.benchmark`."""
