"""The command, and `python -m longitude`: loads the command line, or says in a line why it cannot be loaded."""

import sys


def main() -> int:
    """Run the command line with the arguments of this process; returns the exit code."""
    try:
        if sys.argv[1:2] == ["--version"]:  # needs no further package
            from longitude import __version__

            print(f"longitude {__version__}")
            return 0
        from longitude.errors import MissingPackage, require_extra

        try:
            require_extra("the command line", "study")
        except MissingPackage as missing:
            print(f"longitude: {missing}", file=sys.stderr)
            return 2
        from longitude.cli import main as run

        return run()
    except KeyboardInterrupt:  # while modules are loaded, before a command has begun
        print("longitude: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
