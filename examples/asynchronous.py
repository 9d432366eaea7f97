"""Several answers in one event loop, which share the target's passes; the request of a wait that is given up ends."""

import argparse
import asyncio

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id")
parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
parser.add_argument("--seconds", type=float, default=60, help="how long to wait for an answer")
arguments = parser.parse_args()

from offload_runtime import Runtime  # noqa: E402 (--help needs none of it)

PROMPTS = ["The sea is", "A good book", "Once upon a time"]


async def answer(runtime: Runtime, prompt: str) -> str:
    """Return what there is of an answer after some seconds."""
    pieces: list[str] = []

    async def read() -> None:
        async for piece in runtime.astream(prompt, max_new_tokens=64, temperature=0.6):
            pieces.append(piece)

    try:
        await asyncio.wait_for(read(), arguments.seconds)
    except asyncio.TimeoutError:
        pieces.append(" … (and no longer)")
    return "".join(pieces)


async def main() -> None:
    """Ask for all answers at once."""
    with Runtime.load(arguments.target, device=arguments.device, max_batch=len(PROMPTS)) as runtime:
        texts = await asyncio.gather(*(answer(runtime, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"== {prompt}{text}")


asyncio.run(main())
