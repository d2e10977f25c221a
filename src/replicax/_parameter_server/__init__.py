"""Variables on parameter servers, and functions that workers run for a coordinator."""
