"""`replicax export`: saved models for programs that do not have replicax."""
