"""Who this process is among the others, which devices it drives, and what all of them do together."""
