"""Machines that share a model: torch.distributed carries rows from the layers of one to those of the next."""

import os


def started_as_one_of_several() -> bool:
    """Return whether torchrun has started this process as one of several. Asked before torch is imported."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
