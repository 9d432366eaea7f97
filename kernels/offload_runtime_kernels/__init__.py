"""Fused kernels of the runtime. Each module holds a Triton kernel, its checking wrapper and a plain torch reference."""
