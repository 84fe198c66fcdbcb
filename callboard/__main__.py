"""The command line: `python -m callboard`, and what the `callboard` command calls."""

import os
import sys


def main() -> int:
    """Run one command and give its exit status."""
    os.umask(0o077)
    from callboard.cli.run import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
