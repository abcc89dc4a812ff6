"""The training itself: the five verbs, the loop, the step, and the trainer that runs a whole plan."""
