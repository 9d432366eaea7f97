"""Runners: tokens in, logits or samples out. They join weights in motion, layers and cache into passes."""
