"""Variables, and where their arrays are stored."""
