"""Propose / verify steps: a drafter guesses tokens, one target pass checks them, equality decides."""

from offload_runtime.speculation.controller import PLAIN, Controller, Cost
from offload_runtime.speculation.dflash import DFlashDrafter, DFlashRunner
from offload_runtime.speculation.draft import DraftRunner
from offload_runtime.speculation.ngram import NGRAM, MatchRates, NgramDrafter, NgramLookup, WithNgrams, drafting
from offload_runtime.speculation.step import Acceptance, Budgets, Drafter, StepOutput, StepWorth, Tally, Texts, run_step
from offload_runtime.speculation.tree import ModelDrafter
from offload_runtime.speculation.triforce import most_guess_rows, num_guesses, verifier_step_bytes
from offload_runtime.speculation.window import MOST_LEVELS, best_tree_tokens, expected_accepted, likely_parents
