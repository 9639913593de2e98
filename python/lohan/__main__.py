"""`lohan` and `python -m lohan`: the command line, if the packages that it needs are installed."""

import sys

# The command line needs these packages; `import lohan` does not.
_PACKAGES = ("click", "rich")


def main() -> None:
    """Run the command line, or print what has to be installed for it."""
    try:
        from lohan.cli import main as command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _PACKAGES:
            raise
        sys.exit(
            f"lohan: the command line needs {' and '.join(_PACKAGES)}, and {error.name} is not"
            f" installed: {sys.executable} -m pip install {' '.join(_PACKAGES)}"
        )
    command(prog_name="lohan")


if __name__ == "__main__":
    main()
