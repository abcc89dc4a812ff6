"""The parent: decide what to run, check it, start it, watch it, explain how it ended."""
