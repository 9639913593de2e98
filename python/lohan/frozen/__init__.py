"""Models that are read but not trained, beside the one that is."""
