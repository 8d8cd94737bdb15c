"""Runs the command line, for `nip-astra` and `python -m nip_astra`."""

try:
    from nip_astra.cli.app import main
except KeyboardInterrupt:  # Ctrl-C in the half second of imports
    raise SystemExit(130) from None

__all__ = ["main"]

if __name__ == "__main__":
    main()
