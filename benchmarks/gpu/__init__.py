"""The speed of one GPU: training steps alone, and complete jobs."""
