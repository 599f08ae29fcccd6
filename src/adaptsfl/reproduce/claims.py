"""The paper's claims, from the table in claims.toml beside the recipes, and `judge`, which decides every row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from adaptsfl.config import Section, parse, read_toml
from adaptsfl.reproduce import comparisons
from adaptsfl.reproduce.compare import Missing
from adaptsfl.reproduce.numbers import Evidence
from adaptsfl.reproduce.study import recipes_folder

Verdict = Literal["holds", "holds in part", "does not hold", "not tried"]


class Claim(Section):
    """A claim of the paper: a row of claims.toml, which explains the fields."""

    name: str
    figure: str
    claim: str
    criterion: str
    panels: list[str]
    compare: str
    given: dict[str, Any] = Field(default_factory=dict)
    paper: str = "–"
    trained: bool = True
    everywhere: bool = False


@dataclass(frozen=True)
class JudgedClaim:
    """A claim, what was measured for it, and the verdict.

    Attributes:
        measured: with the spread over seeds; one line per panel.
        note: why it does not hold, or only in part, if a person has found the reason.
    """

    claim: Claim
    measured: str
    verdict: Verdict
    note: str = ""


def _load() -> tuple[Claim, ...]:
    path = recipes_folder() / "claims.toml"
    return tuple(parse(Claim, {"name": name, **row}, source=str(path)) for name, row in read_toml(path).items())


CLAIMS = _load()


def judge(evidence: Evidence) -> list[JudgedClaim]:
    """Judge every claim by the runs."""
    return [_judged(claim, evidence) for claim in CLAIMS]


def _judged(claim: Claim, evidence: Evidence) -> JudgedClaim:
    """Judge a claim in its panels. If some were not run, it holds in part at best."""
    texts, missing = [], []
    scores: list[float] = []
    for key in claim.panels:
        try:
            scored = getattr(comparisons, claim.compare)(evidence, key, **claim.given)
        except Missing as error:
            missing.append(str(error))
            continue
        texts.append(f"{key}: {scored.measured}" if claim.trained else scored.measured)
        scores += scored.scores
    if missing:
        texts.append(f"not run: {', '.join(missing)}")
    verdict = "does not hold" if claim.everywhere and 0 in scores else verdict_of(scores)
    return JudgedClaim(claim, "\n".join(texts), "holds in part" if missing and verdict == "holds" else verdict)


def verdict_of(scores: Sequence[float]) -> Verdict:
    """Return the verdict: it holds if all scores are 1, in part if their sum is at least half of that."""
    if not scores:
        return "not tried"
    if min(scores) == 1:
        return "holds"
    return "holds in part" if sum(scores) >= len(scores) / 2 else "does not hold"
