"""`python -m lohan`: the command line."""

from lohan.cli import main

if __name__ == "__main__":
    main(prog_name="lohan")
