"""`Server`: a socket, a thread with the event loop, and a model that is served while it is there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import uvicorn

from offload_runtime.engine import Scheduler
from offload_runtime.errors import OptionError
from offload_runtime.server.app import Service, make_app
from offload_runtime.server.config import ServerConfig

if TYPE_CHECKING:
    from offload_runtime.engine import Runtime

_BACKLOG = 128
_MOST_CONNECTIONS = 512  # beyond these: 503; a process has 1024 files unless it asks for more
_LAST_WORDS_S = 5  # for responses that are being sent when all answers have ended


class Server(AbstractContextManager["Server"]):
    """Listens from the beginning, so that `/health` can say that a model is being loaded; answers within `serving`.

    Args:
        config: Where to listen and who may ask.
        log: Called with a line for each request that was answered or refused.

    Attributes:
        url: Where it is reached.

    Raises:
        OptionError: The port is taken, or there is no such address here.
    """

    def __init__(self, config: ServerConfig, log: Callable[[str], None] = lambda line: None) -> None:
        self._config, self._service = config, Service(config, log)
        self._socket = _listen(config)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            make_app(self._service, config), log_config=None, access_log=False, lifespan="off", ws="none", http="h11",
            loop="asyncio", server_header=False, proxy_headers=False, timeout_graceful_shutdown=_LAST_WORDS_S,
            limit_concurrency=_MOST_CONNECTIONS,
        )  # fmt: skip
        self._uvicorn = uvicorn.Server(settings)
        # Signals are for the main thread, and uvicorn leaves them alone in any other.
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="http", daemon=True
        )  # fmt: skip
        self._thread.start()

    @contextmanager
    def serving(self, runtime: Runtime, *models: str) -> Iterator[Scheduler]:
        """Answer requests with a runtime by these names. At the end no more are taken, and those that there are may
        finish within `grace_s`."""
        config = self._config
        with Scheduler(
            runtime, max_waiting=config.max_waiting, prefix_cache_bytes=config.prefix_cache_bytes or 0,
            sessions=config.sessions, sessions_bytes=config.sessions_bytes,
        ) as scheduler:  # fmt: skip
            self._service.begin(runtime, scheduler, *models)
            try:
                yield scheduler
            finally:
                self._service.state = "stopping"
                scheduler.close(config.grace_s)

    def close(self) -> None:
        """Stop listening, once what is left of responses is sent."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self._socket.close()
        self._service.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(config: ServerConfig) -> socket.socket:
    """A socket that listens where it should."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # Only where a socket says TCP does asyncio send at once (TCP_NODELAY): else a response may wait 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise OptionError(
            f"cannot listen at {config.host} port {config.port} ({error.strerror}): choose another --port, or 0"
        ) from error
    return listening
