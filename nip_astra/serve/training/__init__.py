"""Train the models of a service: our own routes, and those of Tinker's protocol."""
