"""Propose / verify rounds: a proposer guesses tokens, one target pass checks them, equality decides."""

from offload_runtime.speculation.acceptance import Acceptance, Tally
from offload_runtime.speculation.calibration import LinkTimes, StepWorth
from offload_runtime.speculation.controller import (
    PLAIN,
    AcceptanceModel,
    Choice,
    Controller,
    LatencyModel,
    guessed_cost,
    size_for,
    size_within,
)
from offload_runtime.speculation.draft import DraftProposer, TreeDraftProposer
from offload_runtime.speculation.ngram import NgramLookup, NgramProposer, WithNgrams, drafting
from offload_runtime.speculation.proposer import NoProposer, Proposer, Turn, makes_trees
from offload_runtime.speculation.step import Round, SpeculativeDecoder, accepted_path, play_round
from offload_runtime.speculation.tree import CandidateTree, Proposal
from offload_runtime.speculation.triforce import TriForceProposer

__all__ = [
    "PLAIN",
    "Acceptance",
    "AcceptanceModel",
    "CandidateTree",
    "Choice",
    "Controller",
    "DraftProposer",
    "LatencyModel",
    "LinkTimes",
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
    "WithNgrams",
    "accepted_path",
    "drafting",
    "guessed_cost",
    "makes_trees",
    "play_round",
    "size_for",
    "size_within",
]
