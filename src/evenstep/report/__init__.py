"""Records in, words for people out."""
