"""Weights: checkpoints are opened and validated, described, and loaded into packed host arenas.

How a matrix is stored is known here alone: others see a `Weight`, which multiplies rows, and bytes per layer. The room
knows nothing of devices, copies and plans.
"""

from offload_runtime.weights.checkpoint import CheckpointSource, DescribedModel, sampling_defaults
from offload_runtime.weights.encoding import Weight
from offload_runtime.weights.fields import Fields
from offload_runtime.weights.hub import fetch_demo_model
from offload_runtime.weights.layout import ModelLayout, checkpoint_tensors, layer_layout
from offload_runtime.weights.loader import HostWeights, MatricesNotCodable, load_weights
from offload_runtime.weights.neighbours import FoundDraft, find_drafts, usual_draft
from offload_runtime.weights.sources import describe_model, open_checkpoint
from offload_runtime.weights.vocabulary import SharedVocabulary, share_vocabulary
