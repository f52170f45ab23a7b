"""What serving engines report of speculative decoding, and whether it is what was predicted."""
