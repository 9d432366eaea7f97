"""Replicas of a model on a Ray cluster behind one OpenAI endpoint, http://127.0.0.1:PORT/v1, until Ctrl-C.

A conversation goes to the replica that has read it before. A replica that dies is replaced, and what it has kept in its
directory of --sessions is there again; answers that it had not begun are given by another one. The cluster is this
machine, or with --address auto those on which `ray start` was run. Nothing here asks for a key: keep the port inside.
"""

import argparse
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id, the same on every machine")
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--device", default="auto", help="auto or cuda: a GPU a replica; cpu")
parser.add_argument("--draft", default="auto", help="auto, a small model of the same family, ngram or none")
parser.add_argument("--context", type=int, help="tokens of a conversation")
parser.add_argument("--requests", type=int, default=8, help="how many a replica answers at once")
parser.add_argument("--sessions", type=Path, help="a directory where each replica keeps what it has read")
parser.add_argument("--port", type=int, default=8000)
parser.add_argument("--address", help="of a cluster that is there; auto: of this machine's")

MOST_CONVERSATIONS = 1000  # that are known to be on a replica
MOST_TRIES = 20  # of an answer that is lost before it began, each on a replica that is there


def conversation_of(body: bytes) -> str:
    """Return what stands for the conversation that a request is of: its beginning, up to what was asked first."""
    try:
        asked = json.loads(body)
        messages = asked.get("messages", asked.get("input"))
        begun = str(messages or asked.get("prompt"))[:500]
        if isinstance(messages, list):
            first = next((at for at, one in enumerate(messages) if one.get("role") == "user"), 0)
            begun = json.dumps(messages[: first + 1])
    except (ValueError, AttributeError):
        begun = ""  # the replica says what is wrong
    return hashlib.blake2b(begun.encode(), digest_size=8).hexdigest()


class Replica:
    """Answers what the door passes on, by a server of its own that nothing but this process reaches."""

    def __init__(self, target: str, options: dict[str, Any], sessions: Path | None) -> None:
        import httpx

        from offload_runtime import Runtime
        from offload_runtime.config import ServerConfig
        from offload_runtime.errors import StorageError
        from offload_runtime.server.app import Server

        self._stack = ExitStack()
        if sessions is not None:
            sessions.mkdir(parents=True, exist_ok=True)
        runtime = self._stack.enter_context(Runtime.load(target, **options))
        for number in count():  # the first directory that no other replica has: it may be a dead one's
            own = None if sessions is None else sessions / str(number)
            try:
                with ExitStack() as opened:
                    server = opened.enter_context(Server(ServerConfig(port=0, sessions=own)))
                    opened.enter_context(server.serving(runtime, Path(target).name))
                    self._stack.enter_context(opened.pop_all())
                break
            except StorageError as error:
                if "in use" not in str(error):
                    raise
        self._client = httpx.AsyncClient(base_url=server.url, timeout=None, trust_env=False)

    async def check_health(self) -> None:
        """Raise where it cannot answer any more, so that it is replaced."""
        (await self._client.get("/health")).raise_for_status()

    async def answer(self, method: str, path: str, body: bytes) -> AsyncIterator[Any]:
        """Yield status and type of the answer, then pieces of it."""
        from ray import serve

        await self.holds(serve.get_multiplexed_model_id())
        headers = {"content-type": "application/json"}
        async with self._client.stream(method, path, content=body, headers=headers) as answer:
            yield answer.status_code, answer.headers.get("content-type", "")
            async for piece in answer.aiter_bytes():
                yield piece

    async def holds(self, conversation: str) -> str:
        """Tell Ray, by its decorator, which conversations are here: it sends them here again."""
        return conversation


class Door:
    """Passes requests on to replicas."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")

    async def __call__(self, request: Any) -> Any:
        """Answer a request: as a stream, or at once, and then from another replica if the first one dies."""
        from ray.exceptions import RayActorError
        from starlette.responses import JSONResponse, Response, StreamingResponse

        body = await request.body()
        replicas = self._replicas.options(multiplexed_model_id=conversation_of(body))
        for _ in range(MOST_TRIES):
            pieces = replicas.remote(request.method, request.url.path, body)
            try:
                status, kind = await anext(pieces)
                if kind.startswith("text/event-stream"):
                    return StreamingResponse(self._told(pieces), status, media_type=kind)
                return Response(b"".join([piece async for piece in pieces]), status, media_type=kind)
            except RayActorError as error:
                lost = error
        return JSONResponse(_error(lost), 503)

    async def _told(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield a stream; one whose replica dies says so, and ends."""
        from ray.exceptions import RayActorError

        try:
            async for piece in pieces:
                yield piece
        except RayActorError as error:
            yield b"data: %s\n\n" % json.dumps(_error(error)).encode()


def _error(error: Exception) -> dict[str, Any]:
    said = f"the replica that was answering is gone: ask again ({type(error).__name__})"
    return {"error": {"message": said, "type": "server_error", "param": None, "code": None}}


def main() -> None:
    """Serve until Ctrl-C."""
    arguments = parser.parse_args()
    import ray
    from ray import serve

    options = {"device": arguments.device, "draft": arguments.draft, "max_batch": arguments.requests}
    if arguments.context is not None:
        options["context"] = arguments.context
    takes = {"num_cpus": 0} if arguments.device == "cpu" else {"num_gpus": 1}
    Replica.holds = serve.multiplexed(max_num_models_per_replica=MOST_CONVERSATIONS)(Replica.holds)
    ray.init(arguments.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
    replicas = serve.deployment(
        num_replicas=arguments.replicas, max_ongoing_requests=4 * arguments.requests, ray_actor_options=takes,
        health_check_period_s=2, graceful_shutdown_timeout_s=5,
    )(Replica).bind(arguments.target, options, arguments.sessions and arguments.sessions.resolve())  # fmt: skip
    door = serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0})(Door)
    serve.run(door.bind(replicas), blocking=False)
    print(f"ready: http://127.0.0.1:{arguments.port}/v1", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
