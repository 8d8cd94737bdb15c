"""Tinker's protocol over the models of a service, so that its own SDK trains and samples here."""
