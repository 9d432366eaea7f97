"""Matrices that are larger than the scratch that they are decoded into are multiplied in slices of their rows."""

from typing import Any

import pytest
import torch
from offload_runtime_kernels.low_bit_copy import COPY, GROUP, quantise
from offload_runtime_kernels.scaled_rows import decode_scaled_reference

from offload_runtime.weights.encoding import Encoding, Format, Scaled, scaled_bytes, scaled_rows

HEIGHT, COLUMNS = 24, 2 * GROUP


@pytest.mark.parametrize(
    "how", [{}, {"gated": "silu"}, {"residual": True}, {"bias": True}, {"gated": "gelu", "bias": True}]
)
def test_slices_have_the_product_of_the_whole(how: dict[str, Any]) -> None:
    """Of a part in 4 bits above one in elements; slices begin and end within both."""
    torch.manual_seed(0)
    values, x = torch.randn(HEIGHT, COLUMNS), torch.randn(3, COLUMNS)
    stored, dense = torch.zeros(scaled_bytes(COPY, 14, COLUMNS), dtype=torch.uint8), values.clone()
    quantise(values[:14].contiguous(), scaled_rows(stored, COPY, 14, COLUMNS))
    decode_scaled_reference(scaled_rows(stored, COPY, 14, COLUMNS), COPY, 0, dense[:14])
    encoding = Encoding.of(torch.float32, [(14, Scaled(COPY)), (10, Format("F32"))])
    memory = torch.zeros(encoding.nbytes(values.shape), dtype=torch.uint8)
    memory[: len(stored)] = stored
    memory[-values[14:].nbytes :] = values[14:].contiguous().view(-1).view(torch.uint8)
    bias = torch.randn(HEIGHT) if "bias" in how else None
    found = []
    for room in (HEIGHT, 10):
        weight = encoding.weight(memory, (HEIGHT, COLUMNS), bias, torch.zeros(room * COLUMNS * 4, dtype=torch.uint8))
        residual = torch.ones(3, HEIGHT) if "residual" in how else None
        found.append(weight.linear(x, residual=residual, gated=how.get("gated")))
        assert residual is None or found[-1] is residual
        decoded = torch.cat([rows.clone() for _, rows in weight.slices()])
        assert torch.equal(decoded, dense)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-3)
