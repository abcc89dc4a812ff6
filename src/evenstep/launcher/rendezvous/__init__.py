"""How launchers on one or many machines find each other, and who is let in."""
