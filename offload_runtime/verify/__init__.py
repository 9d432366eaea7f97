"""The proof, on the machine at hand, that speculation and offloading change nothing: `offload-runtime verify`.

It drives a loaded `Runtime` from outside: equality with plain decoding, token by token and bit by bit, and a test of
goodness of fit of what is sampled.
"""

from offload_runtime.verify.distribution import Fit
from offload_runtime.verify.equality import IdentityRun, compare_one_card
from offload_runtime.verify.report import VerificationPlan, VerificationReport, decode_plainly, verify
