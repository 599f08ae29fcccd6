"""The headline in numbers: how much sooner AdaptSFL gets to one accuracy than each of the others, panel by panel."""

from dataclasses import dataclass

from adaptsfl.report.series import OURS
from adaptsfl.reproduce.compare import Missing, Number, Seeds, mean_seconds, seeds_of, target_of, time_ratio
from adaptsfl.reproduce.numbers import Evidence, label_of

HEADLINE = "accuracy"  # the figure with all policies


@dataclass(frozen=True)
class SpeedUps:
    """One panel.

    Attributes:
        target: the accuracy; see `compare.target_of`.
        times: virtual seconds to it by policy, ours first, as people call them.
        ratios: the others' times over ours; a bound where one never gets there.
    """

    name: str
    target: float
    times: dict[str, Number]
    ratios: dict[str, Number]


def speed_ups(evidence: Evidence) -> list[SpeedUps]:
    """Return the panels of the headline that were run."""
    keys = [panel.key for study in evidence.studies if study.name == HEADLINE for panel in study.panels]
    found = []
    for key in keys:
        try:
            found.append(_panel(evidence, key))
        except Missing:
            continue
    return found


def _panel(evidence: Evidence, key: str) -> SpeedUps:
    policies = dict.fromkeys([OURS, *evidence.policies(key)])
    runs: dict[str, Seeds] = {policy: seeds_of(evidence, key, policy) for policy in policies}
    target = target_of(*runs.values())
    names = {policy: label_of(next(iter(seeds.values()))) for policy, seeds in runs.items()}
    return SpeedUps(
        name=key.partition("/")[2],
        target=target,
        times={names[policy]: mean_seconds(seeds, target) for policy, seeds in runs.items()},
        ratios={
            names[policy]: time_ratio(seeds, runs[OURS], target) for policy, seeds in runs.items() if policy != OURS
        },
    )


def speed_up_rows(found: list[SpeedUps]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: a line per panel, how many times AdaptSFL's time each of the others takes."""
    others = list(dict.fromkeys(name for panel in found for name in panel.ratios))
    rows = [
        [
            panel.name,
            f"{100 * panel.target:.3g} %",
            str(next(iter(panel.times.values()))),
            *(str(panel.ratios.get(name, "–")) for name in others),
        ]
        for panel in found
    ]
    return ["", "to accuracy", "AdaptSFL", *others], rows
