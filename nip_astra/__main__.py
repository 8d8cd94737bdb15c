"""Runs the command line for `python -m nip_astra`."""

from nip_astra.cli.app import main

if __name__ == "__main__":
    main()
