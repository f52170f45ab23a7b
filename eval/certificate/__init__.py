"""Exactness proved by enumeration: laws, languages, the grid, planted faults."""
