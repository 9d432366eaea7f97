"""Weights: checkpoints are opened and validated, described, and loaded into packed host arenas.

How a matrix is stored is known here alone: others see a `Weight`, which multiplies rows, and bytes per layer. The room
knows nothing of devices, copies and plans.
"""
