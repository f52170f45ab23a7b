"""Checks of target, rows, head and one step: one function a check, shared with training."""
