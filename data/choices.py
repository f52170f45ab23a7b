"""How features are stored, for settings that are read before torch is loaded."""

PACKED = ("int8", "fp8", "int4")
"""Forms that keep rounded states, and laws in place of the last state."""

TOP_K = 44
"""Ids kept of a law. With int8 states of a target of hidden size 576, a store then takes 0.42 of
the bytes of three bfloat16 layers and the last state where every token is supervised, and less
where fewer are."""
