"""How launchers on one or many machines find and authenticate each other."""
