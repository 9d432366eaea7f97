"""Machines that share a model: torch.distributed carries rows from the layers of one to those of the next."""
