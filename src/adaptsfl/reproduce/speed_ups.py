"""The headline numbers: AdaptSFL's speed-up to one accuracy over each other policy, panel by panel."""

from contextlib import suppress

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.compare import Missing, label, mean_seconds, seeds_of, target_of, time_ratio
from adaptsfl.reproduce.numbers import Evidence

HEADLINE = "accuracy"  # the figure with all policies


def speed_up_rows(evidence: Evidence) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: a row per panel that was run, with each other policy's time over AdaptSFL's."""
    found: dict[str, dict[str, str]] = {}
    for panel in (panel for study in evidence.studies if study.name == HEADLINE for panel in study.panels):
        with suppress(Missing):
            found[panel.name] = _cells(evidence, panel.key)
    headings = list(
        dict.fromkeys(["", "to accuracy", "AdaptSFL", *(name for cells in found.values() for name in cells)])
    )
    return headings, [[name, *(cells.get(heading, "–") for heading in headings[1:])] for name, cells in found.items()]


def _cells(evidence: Evidence, key: str) -> dict[str, str]:
    ours, *others = [seeds_of(evidence, key, policy) for policy in dict.fromkeys([OURS, *evidence.policies(key)])]
    target = target_of(ours, *others)
    ratios = {label(runs): str(time_ratio(runs, ours, target)) for runs in others}
    return {"to accuracy": f"{100 * target:.3g} %", "AdaptSFL": str(mean_seconds(ours, target)), **ratios}
