"""The command line. Heavy packages are imported only by the commands that need them."""
