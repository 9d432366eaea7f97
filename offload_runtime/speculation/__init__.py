"""Propose / verify rounds: a proposer guesses tokens, one target pass checks them, equality decides."""

from offload_runtime.speculation.acceptance import Acceptance, Tally
from offload_runtime.speculation.proposers import DraftProposer, NgramLookup, NgramProposer, NoProposer, Proposer, Turn
from offload_runtime.speculation.rounds import Round, SpeculativeDecoder, count_accepted, play_round
from offload_runtime.speculation.triforce import TriForceProposer

__all__ = [
    "Acceptance",
    "DraftProposer",
    "NgramLookup",
    "NgramProposer",
    "NoProposer",
    "Proposer",
    "Round",
    "SpeculativeDecoder",
    "Tally",
    "TriForceProposer",
    "Turn",
    "count_accepted",
    "play_round",
]
