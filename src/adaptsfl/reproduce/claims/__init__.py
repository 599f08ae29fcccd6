"""What the paper claims in Sections I and VII, in its order, and what the runs say to each: one function per claim.

A function's docstring is the claim, in our words. It reads the runs of figure/panel by policy, compares them with the
functions of `compare`, whose tolerances hold for all, and returns what was measured, and the verdict.
"""

from adaptsfl.reproduce.claims import ablations, benchmarks, motivation, sweeps
from adaptsfl.reproduce.claims.claim import Claim, ClaimRow
from adaptsfl.reproduce.numbers import Evidence

__all__ = ["CLAIMS", "Claim", "ClaimRow", "judge"]

CLAIMS: tuple[Claim, ...] = (*motivation.CLAIMS, *benchmarks.CLAIMS, *sweeps.CLAIMS, *ablations.CLAIMS)


def judge(evidence: Evidence) -> list[ClaimRow]:
    """Judge every claim by what was run."""
    return [claim.row(evidence) for claim in CLAIMS]
