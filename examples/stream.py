"""A chat whose answers appear as they come; keys and values are kept between the turns.

Run as `python examples/stream.py path/or/hub-id`.
"""

import sys

from offload_runtime import Runtime

with Runtime.load(sys.argv[1]) as runtime:
    conversation = runtime.conversation(system="You answer in one sentence.")
    for question in ("Why is the sky blue?", "And in the evening?"):
        print(f"> {question}")
        for piece in conversation.say(question, max_new_tokens=48):
            print(piece, end="", flush=True)
        print()
