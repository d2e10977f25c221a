"""`Strategy`, `StrategyExtended`, and the strategies."""
