"""The implementation of the subcommands of `lohan`, which cli.py declares."""
