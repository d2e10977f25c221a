"""Running replica functions, eagerly or compiled, and `rx.function`."""
