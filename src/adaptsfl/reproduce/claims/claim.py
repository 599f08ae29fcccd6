"""A claim of the paper, what it becomes when it is judged, and the comparisons that several claims are made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.compare import (
    Missing,
    Number,
    Seeds,
    Tried,
    Verdict,
    accuracy,
    falling_accuracy,
    less_accurate,
    longer,
    lower,
    points,
    seeds_of,
    slowdown,
)
from adaptsfl.reproduce.numbers import Evidence, label_of

Judged = tuple[str, Verdict]
Judge = Callable[[Evidence], Judged]

CUTS = [f"fixed@L_c={cut}" for cut in (2, 4, 8, 12)]
HALF = "in part if at least half of these comparisons do"


@dataclass(frozen=True)
class ClaimRow:
    """A claim, and what became of it.

    Attributes:
        name: short, for findings and links.
        figure: the paper's.
        claim: in our words.
        paper: its number, or a dash.
        criterion: what decides.
        measured: with the spread over seeds; one line per panel.
        note: why it does not hold, or not in full, where somebody found out.
        trained: whether runs say it; else costs do.
    """

    name: str
    figure: str
    claim: str
    paper: str
    criterion: str
    measured: str
    verdict: Verdict
    note: str = ""
    trained: bool = True


@dataclass(frozen=True)
class Claim:
    """A claim before it is judged; the fields are those of `ClaimRow`."""

    name: str
    figure: str
    claim: str
    paper: str
    criterion: str
    judge: Judge
    trained: bool = True

    def row(self, evidence: Evidence) -> ClaimRow:
        """Judge it."""
        try:
            measured, verdict = self.judge(evidence)
        except Missing as error:
            measured, verdict = f"not run: {error}", "not tried"
        return ClaimRow(
            self.name, self.figure, self.claim, self.paper, self.criterion, measured, verdict, trained=self.trained
        )


class Claims(list[Claim]):
    """The claims of a section, in its order."""

    def add(self, figure: str, criterion: str, paper: str = "–", *, trained: bool = True) -> Callable[[Judge], Judge]:
        """Register a function under its name; its docstring is the claim in our words."""

        def register(judge: Judge) -> Judge:
            claim = " ".join((getdoc(judge) or "").split())
            self.append(Claim(judge.__name__.replace("_", "-"), figure, claim, paper, criterion, judge, trained))
            return judge

        return register


def all_of(evidence: Evidence, key: str, policies: Iterable[str]) -> dict[str, Seeds]:
    """Return the runs of several policies in figure/panel."""
    return {policy: seeds_of(evidence, key, policy) for policy in policies}


def listed(runs: Mapping[str, Seeds], values: Mapping[str, Number]) -> str:
    """Return a value for each policy as text."""
    return ", ".join(f"{label(runs[policy])} {value}" for policy, value in values.items())


def label(runs: Seeds) -> str:
    """Return how the policy of runs is called."""
    return label_of(next(iter(runs.values())))


def falling(runs: Mapping[str, Seeds]) -> Tried:
    """Try whether converged accuracy falls from policy to policy."""
    values = {policy: accuracy(seeds) for policy, seeds in runs.items()}
    return Tried(f"converged accuracy {listed(runs, values)}", [falling_accuracy(list(runs.values()))])


def ours_sooner(evidence: Evidence, key: str, policies: Sequence[str]) -> Tried:
    """Compare AdaptSFL's time with that of others: 1 for each that takes longer."""
    ours, others = seeds_of(evidence, key, OURS), all_of(evidence, key, policies)
    ratios = {policy: slowdown(runs, ours) for policy, runs in others.items()}
    scores = [float(longer(ratio)) for ratio in ratios.values()]
    return Tried(f"time over AdaptSFL's: {listed(others, ratios)}", scores)


def ours_as_accurate(evidence: Evidence, key: str, policies: Sequence[str]) -> Tried:
    """Compare AdaptSFL's converged accuracy with that of others: 1 for each that is not above."""
    ours, others = seeds_of(evidence, key, OURS), all_of(evidence, key, policies)
    differences = {policy: points(ours, runs) for policy, runs in others.items()}
    scores = [float(not lower(difference)) for difference in differences.values()]
    return Tried(f"converged accuracy {accuracy(ours)}, against {listed(others, differences)}", scores)


def ours_ahead(evidence: Evidence, key: str, policies: Sequence[str]) -> Tried:
    """Compare AdaptSFL with others in both: 1 for each that takes longer and is not more accurate."""
    time, accurate = ours_sooner(evidence, key, policies), ours_as_accurate(evidence, key, policies)
    scores = [min(pair) for pair in zip(time.scores, accurate.scores, strict=True)]
    return Tried(f"{time.measured}; {accurate.measured}", scores)


def worse(evidence: Evidence, key: str, policy: str, other: str) -> Tried:
    """Compare two policies: 1 if the first takes longer and is not more accurate.

    Half if it takes longer but is more accurate, or is less accurate but does not take longer.
    """
    runs, better = seeds_of(evidence, key, policy), seeds_of(evidence, key, other)
    ratio, behind = slowdown(runs, better), points(better, runs)
    slower, less, more = longer(ratio), less_accurate(runs, better), less_accurate(better, runs)
    text = f"{label(runs)} {ratio} of the time of {label(better)}; behind in converged accuracy by {behind}"
    return Tried(text, [1.0 if slower and not more else 0.5 if slower or less else 0.0])


def together(*tried: Tried) -> Tried:
    """Return several as one."""
    return Tried("; ".join(one.measured for one in tried), [score for one in tried for score in one.scores])
