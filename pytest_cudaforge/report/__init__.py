"""What a run found, from one model of rows: the page of the run, markdown per target, a summary, versioned JSON."""
