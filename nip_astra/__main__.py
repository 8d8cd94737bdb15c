"""`python -m nip_astra` is the command line."""

from nip_astra.cli.app import main

if __name__ == "__main__":
    main()
