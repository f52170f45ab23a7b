"""How many tokens to draft in a round: policies, replayed on a trace and run in the decode loop."""
