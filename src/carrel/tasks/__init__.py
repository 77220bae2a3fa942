"""Tasks: datasets and samples, the place of one sample, the verdict on it, and running many."""
