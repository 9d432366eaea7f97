"""A chat whose answers appear as they come; keys and values are kept between the turns."""

import argparse

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", help="a directory, a GGUF file or a hub id, of a model with a chat template")
parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
arguments = parser.parse_args()

from offload_runtime import Runtime  # noqa: E402 (--help needs none of it)

with Runtime.load(arguments.target, device=arguments.device) as runtime:
    conversation = runtime.conversation(system="You answer in one sentence.")
    for question in ("Why is the sky blue?", "And in the evening?"):
        print(f"> {question}")
        for piece in conversation.say(question, max_new_tokens=48):
            print(piece, end="", flush=True)
        print()
