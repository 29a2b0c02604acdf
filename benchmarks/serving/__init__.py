"""A service under load, and under attack."""
