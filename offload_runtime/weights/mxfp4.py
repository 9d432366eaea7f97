"""MXFP4 in safetensors, as gpt-oss has it: of all experts of a layer blocks, scales and biases in a tensor each. Its
matrices are read expert by expert, and kept as GGUF's blocks.

    w = q * 2^(scale - 127), q a number of E2M1, rounded to the dtype of the run

is what transformers' `convert_moe_packed_tensors` makes of them in bf16, whose negative zeros are 0 here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import torch

from offload_runtime.errors import CheckpointError
from offload_runtime.stream.arena import PIECE_BYTES, Staging, own_or
from offload_runtime.weights.encoding import LARGEST_POWER, format_of
from offload_runtime.weights.header import StoredTensor, damaged

EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up|down)_proj_blocks")
MXFP4 = "MXFP4"


def mxfp4_rows(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return rows as a GGUF file has them, uint8 [..., K / 32 * 17], of uint8 blocks [..., K / 32, 16] of neighbouring
    numbers, the lower bits first, and scales [..., K / 32]: in a block of a file a byte has a number of either half."""
    first, second = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).chunk(2, -1)
    return torch.cat((scales[..., None], first | second << 4), -1).flatten(-2)


@dataclass(frozen=True)
class ExpertTensor(StoredTensor):
    """A matrix [M, K] of an expert in MXFP4: from a row on, and `start` rows further, every `step`th of the
    rows of all experts that `blocks` and `scales` have."""

    blocks: StoredTensor
    scales: StoredTensor
    row: int
    start: int
    step: int
    form: ClassVar[str] = MXFP4

    def fill(self, out: torch.Tensor, staging: Staging | None = None) -> None:
        """Read it into uint8 [M, bytes of a stored row], or decoded into `out` [M, K] of a float dtype.

        Raises:
            CheckpointError: A file ends too early, or scales are no numbers or beyond 2^100.
        """
        height, groups = self.shape[0], self.scales.shape[-1]
        row_bytes = max(self.step * self.nbytes, out.nbytes) // height
        piece_rows = max(1, PIECE_BYTES // row_bytes)
        with own_or(staging) as pieces:
            device = pieces.device if out.is_cpu else out.device
            with pieces.piece(piece_rows * row_bytes, device) as piece:
                rows = out.view(height, -1)
                for at, part in zip(range(0, height, piece_rows), rows.split(piece_rows), strict=True):
                    scales_bytes, first = len(part) * self.step * groups, (self.row + at * self.step) * groups
                    scales, blocks = piece.memory[: 17 * scales_bytes].split((scales_bytes, 16 * scales_bytes))
                    self.scales.read_into(scales.numpy().data, first)
                    self.blocks.read_into(blocks.numpy().data, 16 * first)
                    if int(scales.max()) > LARGEST_POWER:
                        raise damaged(self.path, f"scales of {self.name} are no numbers, or beyond 2^100")
                    piece.convert(17 * scales_bytes, part, self._convert)

    def _convert(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Turn what was read into what `out` has."""
        how, columns = format_of(self.dtype), self.shape[1]
        scales, blocks = stored.view(17, -1).split((1, 16))
        shape = (len(out), self.step, columns // 32)
        rows = mxfp4_rows(blocks.view(*shape, 16)[:, self.start], scales.view(shape)[:, self.start])
        if out.dtype == torch.uint8:
            how.store_rows(rows, columns, out)
        else:
            how.decode_file_rows(rows, out)


def with_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint with those of each expert, `experts.0.gate_proj.weight`, in place of blocks
    and scales of all, where rows of gates and ups take turns.

    Raises:
        CheckpointError: Blocks have no scales, or are of other kinds or shapes.
    """
    found = dict(stored)
    for name, blocks in stored.items():
        if (match := EXPERTS.fullmatch(name)) is None:
            continue
        stem, parts = match[1], ("gate", "up") if match[2] == "gate_up" else ("down",)
        scales = stored.get(f"{stem}{match[2]}_proj_scales")
        if scales is None:
            raise CheckpointError(f"{blocks.path.parent} lacks the scales of {name}: download it again")
        shape, step = blocks.shape, len(parts)
        fitting = len(shape) == 4 and shape == (*scales.shape, 16) and 0 not in shape and shape[1] % step == 0
        if (blocks.dtype, scales.dtype) != ("U8", "U8") or not fitting:
            raise CheckpointError(
                f"{blocks.path}: {name} is {blocks.dtype} {list(shape)} and its scales are {scales.dtype} "
                f"{list(scales.shape)}, expected U8 [experts, rows, blocks, 16] and one scale for each block: "
                "download it again"
            )
        del found[name], found[scales.name]
        experts, rows, groups, _ = shape
        of_one, nbytes = (rows // step, groups * 32), rows // step * groups * 17
        for number, (start, part) in product(range(experts), enumerate(parts)):
            called = f"{stem}{number}.{part}_proj.weight"
            found[called] = ExpertTensor(
                blocks.path, called, MXFP4, of_one, blocks.offset_bytes, nbytes, blocks, scales, number * rows, start,
                step,
            )  # fmt: skip
    return found
