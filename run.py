"""Run an experiment: `python run.py --trainer ast_dpo`; see `python run.py --help`."""

try:
    from nip_astra.__main__ import main
except ModuleNotFoundError as error:
    raise SystemExit(
        f"error: the package {error.name!r} is missing. Activate the virtual environment, or "
        "install what is needed: pip install -e ."
    ) from None

if __name__ == "__main__":
    main()
