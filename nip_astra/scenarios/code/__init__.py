"""Code validation: is a solution of a programming problem right? Its data are made here."""
