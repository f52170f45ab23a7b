"""Draft trees: shapes, growth, plans, calibration."""
