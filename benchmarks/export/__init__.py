"""Exported files next to the network that they were made of: accuracy, rates, sizes."""
