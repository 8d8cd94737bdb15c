"""Many runs by one command: what is run, how it is kept going, and what the runs say together."""
