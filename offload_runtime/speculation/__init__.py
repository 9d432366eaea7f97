"""Propose / verify steps: a proposer guesses tokens, one target pass checks them, equality decides."""

from offload_runtime.speculation.calibration import StepWorth
from offload_runtime.speculation.controller import COPY, PLAIN, Controller, Cost, size_for, size_within
from offload_runtime.speculation.draft import DraftProposer, TreeDraftProposer
from offload_runtime.speculation.ngram import NGRAM, NgramLookup, NgramProposer, WithNgrams, drafting
from offload_runtime.speculation.step import (
    Acceptance,
    Budgets,
    Proposer,
    StepResult,
    Tally,
    Texts,
    accepted_path,
    makes_trees,
    run_step,
    still_computing,
)
from offload_runtime.speculation.tree import CandidateTree
from offload_runtime.speculation.triforce import TriForceProposer
