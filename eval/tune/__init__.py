"""What speculation buys on a machine: costs, acceptance, and the settings that follow."""
