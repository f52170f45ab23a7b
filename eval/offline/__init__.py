"""Exact acceptance of traced text without decoding: chains, trees, traces, tables."""
