"""The command line: one module per group of commands, `run.main` around all of them."""
