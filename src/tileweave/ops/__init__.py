"""What torch sees: the reference of every operator, its registration, and one file an operator."""
