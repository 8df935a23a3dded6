"""The demo: one agent, five ways to keep its history short, one table. `python -m demo --help`."""
