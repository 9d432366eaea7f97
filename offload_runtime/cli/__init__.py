"""The command line: arguments to configuration, and printing. The outermost stop of a token's journey.

Text of the model goes to stdout; progress, status and errors go to stderr. Nothing heavy (torch, transformers, the
engine) is imported before a command needs it, so that `--help` answers at once.
"""

from offload_runtime.cli.app import app, main
