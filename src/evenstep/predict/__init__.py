"""What would n devices give: a forecast of steps from measured ones, with its own error. Arithmetic alone, no torch."""
