"""What the subcommands of `lohan` do; cli.py declares them."""
