"""The report: JSON, page, plots, provenance."""
