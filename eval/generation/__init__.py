"""`outrider.eval.generate`: transformers' `generate`, with any drafter of this house."""
