"""`python -m offload_runtime.cli`: the command line without an installed entry point."""

from offload_runtime.cli.app import main

main()
