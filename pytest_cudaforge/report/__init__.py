"""What a run found, from one model of rows (``rows``): markdown per target, a summary, versioned JSON."""
