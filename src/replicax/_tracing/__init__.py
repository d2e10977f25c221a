"""Where a value is read and written now: frames, contexts, tapes, reads of datasets."""
