"""Inside every training process."""
