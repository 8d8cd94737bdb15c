"""Run an experiment: `python run.py --trainer ast_dpo`; see `python run.py --help`."""

from nip_astra.cli.app import main

if __name__ == "__main__":
    main()
