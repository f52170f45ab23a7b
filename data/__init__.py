"""From conversations to batches; the frozen target as a source of features.

`target` loads it, `rows` reads conversations (`chat` masks them), `store` keeps features, `batches`
packs them, `generate` lets the target write its own text.
"""
