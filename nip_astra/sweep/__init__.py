"""Many runs by one command: their plan, execution, search and results."""
