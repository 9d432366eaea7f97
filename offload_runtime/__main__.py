"""`python -m offload_runtime`: the command line without an installed entry point."""

from offload_runtime.cli import main

main()
