"""Resolution of parameters from names, files and options, and analysis of stored rollouts."""
