"""The fused products of few rows at the shapes of Llama-2-7B, SmolLM2-135M and a Llama of 68M, and ways to cut them.

The reference is what the same part of a pass was before: cuBLAS, with the kernels of RMSNorm and SwiGLU around it; the
residual is added by the norm that comes next. The bound is reading the weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from kernel_cases.case import Case, num_inputs, random_bf16
from offload_runtime_kernels.few_row_linear import LANE_ROWS, LinearConfig, RowNorm, few_row_linear_triton
from offload_runtime_kernels.rms_norm import add_rms_norm
from offload_runtime_kernels.swiglu import swiglu
from timing import graph_times_ms
from triton.runtime.errors import OutOfResources

from offload_runtime.config import GB
from offload_runtime.weights.encoding import Weight

_EPS = 1e-5
_COMPILING_THREADS = 8
_SHOWN = 5


@dataclass(frozen=True)
class Product:
    """One matrix product of a model, W [m, k], and what is fused with it."""

    model: str
    name: str
    m: int
    k: int
    normed: bool = False
    gated: bool = False
    residual: bool = False


def layer_products(model: str, hidden: int, qkv: int, inner: int, vocab: int) -> list[Product]:
    """The four products of a layer and the head."""
    return [
        Product(model, "qkv", qkv, hidden, normed=True),
        Product(model, "o", hidden, hidden, residual=True),
        Product(model, "gate_up", 2 * inner, hidden, normed=True, gated=True),
        Product(model, "down", hidden, inner, residual=True),
        Product(model, "head", vocab, hidden, normed=True),
    ]


PRODUCTS = {
    "7b": (layer_products("7b", 4096, 12288, 11008, 32000), (1, 5, 17)),
    "135m": (layer_products("135m", 576, 960, 1536, 49152), (1,)),
    "68m": (layer_products("68m", 768, 2304, 3072, 32000), (1,)),
}


class Inputs:
    """Random inputs of a product that are taken in turn, more than the caches hold."""

    def __init__(self, product: Product, rows: int) -> None:
        self.product = product
        self.rows = rows
        self.moved_bytes = 2 * product.m * product.k
        self.count = num_inputs(self.moved_bytes)
        self._weight = random_bf16(self.count, product.m, product.k).mul_(product.k**-0.5)
        self._x = random_bf16(rows, product.k)
        self._delta = random_bf16(rows, product.k)
        self._norm = RowNorm(random_bf16(product.k), _EPS)
        self._residual = random_bf16(rows, product.m)

    def fused(self, index: int, config: LinearConfig | None = None) -> torch.Tensor:
        """The kernel."""
        product = self.product
        return few_row_linear_triton(
            self._x, self._weight[index], norm=self._norm if product.normed else None,
            residual=self._residual if product.residual else None, gated=product.gated, config=config,
        )  # fmt: skip

    def unfused(self, index: int) -> torch.Tensor:
        """cuBLAS and the kernels around it."""
        x = self._x
        if self.product.normed:
            x = add_rms_norm(x, self._delta, self._norm.weight, _EPS)
        y = Weight(self._weight[index]).linear(x, self.rows)
        return swiglu(y) if self.product.gated else y

    def added_by_cublas(self, index: int) -> torch.Tensor:
        """cuBLAS adds its product to the residual."""
        return self._residual.addmm_(self._x, self._weight[index].t())

    def time_ms(self, run: Callable[[int], object]) -> float:
        """Median of one `run` in a CUDA graph of at least 16."""
        turn = count()
        return median(graph_times_ms(lambda: run(next(turn) % self.count), calls=max(16, self.count), repeats=5))


def make_case(product: Product, rows: int) -> Case:
    """A product of `rows` rows."""
    inputs = Inputs(product, rows)
    return Case(
        configuration={"model": product.model, "product": product.name, "rows": rows, "m": product.m, "k": product.k},
        kernel=inputs.fused,
        reference=inputs.unfused,
        num_inputs=inputs.count,
        moved_bytes=inputs.moved_bytes,
        operations=2 * rows * product.m * product.k,
    )


def few_row_linear() -> Iterator[Callable[[], Case]]:
    """All cases."""
    for products, model_rows in PRODUCTS.values():
        for rows in model_rows:
            yield from (partial(make_case, product, rows) for product in products)


def lane_configs(k: int) -> Iterator[LinearConfig]:
    """Ways to cut a product of one or two rows: tiles that are as wide as their warps."""
    for block_k in (512, 1024, 2048):
        if block_k < 2 * k:
            for block_m in (2, 4, 8):
                for num_stages in (1, 3) if 2 * block_k <= k else (1,):
                    yield LinearConfig(block_m, block_k, block_k // 256, num_stages)


def dot_configs() -> Iterator[LinearConfig]:
    """Ways to cut a product of more rows; some need more shared memory than there is and are left out when tried."""
    cuts = (
        (16, 256, 2), (16, 512, 4), (32, 128, 2), (32, 256, 4), (64, 64, 4), (64, 128, 4), (64, 256, 4), (128, 64, 4),
        (128, 128, 8),
    )  # fmt: skip
    for cut in cuts:
        for num_stages in (3, 4):
            yield LinearConfig(*cut, num_stages)


def tune(product: Product, rows: int, copy_gbps: float) -> dict[str, Any]:
    """Times of every way that runs, best first, as JSON."""
    inputs = Inputs(product, rows)

    def runs(config: LinearConfig) -> bool:
        try:
            inputs.fused(0, config)
        except OutOfResources:
            return False
        return True

    configs = list(lane_configs(product.k) if rows <= LANE_ROWS else dot_configs())
    # Compiling takes longer than timing, and mostly outside of Python.
    with ThreadPoolExecutor(_COMPILING_THREADS) as pool:
        fitting = [config for config, fits in zip(configs, pool.map(runs, configs), strict=True) if fits]
    torch.cuda.synchronize()
    times = [(inputs.time_ms(partial(inputs.fused, config=config)), config) for config in fitting]
    best = [{**asdict(config), "ms": time} for time, config in sorted(times, key=lambda pair: pair[0])[:_SHOWN]]
    result = {
        "model": product.model, "product": product.name, "rows": rows, "m": product.m, "k": product.k, "best": best,
        "default_ms": inputs.time_ms(inputs.fused), "unfused_ms": inputs.time_ms(inputs.unfused),
        "bound_ms": inputs.moved_bytes / (copy_gbps * GB) * 1e3,
    }  # fmt: skip
    if product.residual:
        result["added_by_cublas_ms"] = inputs.time_ms(inputs.added_by_cublas)
    return result


def tuned(copy_gbps: float) -> Iterator[dict[str, Any]]:
    """Every product with the best ways to cut it, each printed when it is there."""
    for products, model_rows in PRODUCTS.values():
        for rows in model_rows:
            for product in products:
                result = tune(product, rows, copy_gbps)
                times = ", ".join(f"{key} {value:.4f}" for key, value in result.items() if key.endswith("_ms"))
                print(f"{result['model']} {result['product']}, {rows} rows: {times}")
                for way in result["best"]:
                    cut = ", ".join(f"{way[key]}" for key in ("block_m", "block_k", "num_warps", "num_stages"))
                    print(f"    ({cut}): {way['ms']:.4f} ms", flush=True)
                yield result
