"""The tasks that come with evenstep, one file per data set."""
