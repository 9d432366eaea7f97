"""Models: layers, and a file for each family that says which of them a model has.

Nothing is imported here: a family that does not run is refused without torch.
"""
