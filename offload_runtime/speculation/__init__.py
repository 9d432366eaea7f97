"""Propose / verify rounds: a proposer guesses tokens, one target pass checks them, equality decides."""

from offload_runtime.speculation.acceptance import Acceptance, Tally
from offload_runtime.speculation.calibration import StepWorth
from offload_runtime.speculation.candidates import CandidateTree
from offload_runtime.speculation.ngrams import NgramLookup, NgramProposer
from offload_runtime.speculation.proposal import Proposal
from offload_runtime.speculation.proposers import DraftProposer, NoProposer, Proposer, Turn
from offload_runtime.speculation.rounds import Round, SpeculativeDecoder, accepted_path, play_round
from offload_runtime.speculation.tree_draft import TreeDraftProposer
from offload_runtime.speculation.triforce import TriForceProposer

__all__ = [
    "Acceptance",
    "CandidateTree",
    "DraftProposer",
    "NgramLookup",
    "NgramProposer",
    "NoProposer",
    "Proposal",
    "Proposer",
    "Round",
    "SpeculativeDecoder",
    "StepWorth",
    "Tally",
    "TreeDraftProposer",
    "TriForceProposer",
    "Turn",
    "accepted_path",
    "play_round",
]
