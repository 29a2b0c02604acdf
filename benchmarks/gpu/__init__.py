"""What a GPU does with all this: limit, data road and whole jobs."""
