"""Timed runs, each ending in one JSON line."""
