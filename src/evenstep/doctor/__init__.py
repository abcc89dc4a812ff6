"""What this machine can do, what is wrong with it, and what to set: looked up where that is enough, tried where not."""
