"""The server: OpenAI's API and others' over HTTP in front of a `Scheduler`. Beside the command line the outermost stop
of a token's journey.

A request comes through the gate (`gate.py`: who may ask, and how much), is read (`schema.py`), waits for its model
where several take turns (`models.py`, `turns.py`), becomes prompts and `GenerationParams` (`service.py`), and is
answered from the scheduler's events (`answers.py`, in the words of `protocol.py`). Other protocols are translations
into OpenAI's chat and back, a file each (`responses.py`, `anthropic.py`, `ollama.py`). One thread runs the event
loop, another one, the scheduler's, owns the device; neither waits for the other. `Server` (`app.py`) holds both
together. No path that a request names reaches the file system.

What it is made of is the extra `[server]`, which nothing else imports: ask `require_extra` before importing `app`.
"""

from __future__ import annotations

import importlib.util

from offload_runtime.errors import OptionError

_EXTRA = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "sse_starlette")


def require_extra() -> None:
    """Raise `OptionError` unless everything is installed that the server is made of."""
    missing = [name.replace("_", "-") for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise OptionError(f"the server needs {', '.join(missing)}: pip install 'offload-runtime[server]'")
