"""The program: `python -m microscale`, and the console script `microscale`."""

from __future__ import annotations

import sys

from microscale import _microscale


def main() -> None:
    """Runs the program with the process's arguments, and ends the process with its exit code."""
    sys.exit(_microscale.main(["microscale", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
