"""Exported files beside the network that they were made of: accuracy, rates, sizes."""
