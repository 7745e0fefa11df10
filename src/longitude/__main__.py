"""`python -m longitude`: the command line, for launchers that take a module."""

from longitude.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
