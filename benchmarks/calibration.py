"""How good are plans that rest on estimated rounds? Emulated on measured curves, in seconds.

docs/results/calibration.jsonl has training losses and evaluations of fixed plans, measured with the engine: 20 devices,
batches of 16, plain SGD. How many rounds each plan needs relative to I = 1 is known of them. Here the estimator sees
the losses of one plan, as in a run that has kept to it so far; the planner's choice by what it believes, among I ≤ 64
and the cuts measured, is compared with the best by what was measured. Seconds are those of Table II, averaging made
cheaper and dearer.

    python benchmarks/calibration.py     # writes docs/results/calibration.md
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adaptsfl.checks import FloatArray
from adaptsfl.convergence import GrowthRounds, RoundsEstimator

FOLDER = Path("docs/results")
# Seconds of a round and of an averaging in Table II, by layers and L_c: digits, and narrow VGG-11 charged as full.
SECONDS = {
    6: {2: (0.019, 0.076), 4: (0.011, 0.531), 6: (0.002, 0.667)},
    11: {2: (0.082, 0.039), 4: (0.048, 0.493), 8: (0.019, 4.73)},
}
DEARER = np.geomspace(0.05, 5, 9)  # averaging, than in Table II
INTERVALS = np.unique(np.round(np.geomspace(1, 64, 40)))
SEEN = ((16, 33), (16, 65), (16, 400), (64, 130), (64, 400))  # blocks of so many rounds, after so many at most
KAPPAS = np.geomspace(0.005, 10, 60)

Rounds = Callable[[FloatArray, int], FloatArray]  # R of intervals with an L_c
Setting = tuple[str, int]  # its name, and L


def relative_rounds(curve: dict[str, Any], reference: dict[str, Any] | None) -> float | None:
    """Return R of a fixed plan: its rounds over those of I = 1 to the same test losses, at least 1; None if unknown."""
    if "relative_rounds" in curve:
        return float(curve["relative_rounds"])
    assert reference is not None
    rounds, losses = np.array([[one[0], one[3]] for one in reference["evaluations"]]).T
    smooth = np.convolve(np.pad(losses, 1, mode="edge"), [0.25, 0.5, 0.25], "valid")
    falling = np.minimum.accumulate(smooth)
    reached = [(one[0], np.interp(-one[3], -falling, rounds)) for one in curve["evaluations"] if one[3] > falling[-1]]
    counted = [(own, equal) for own, equal in reached if own > 0 and equal > 0]
    if not counted:
        return None
    own, equal = np.array(counted).T
    return max(float(own @ equal / (equal @ equal)), 1.0)


def truths(curves: list[dict[str, Any]]) -> dict[Setting, dict[int, Rounds]]:
    """Return R of every setting and L_c: between measured intervals, in logarithms, as if it were a power."""
    references = {(curve["setting"], curve["seed"]): curve for curve in curves if curve["kind"] == "ref"}
    found: dict[Setting, dict[int, dict[int, list[float]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for curve in curves:
        if curve["kind"] == "full" and curve["interval"] > 1 and curve["layers"] in SECONDS:
            reference = references.get((curve["setting"], curve["seed"]))
            if (rounds := relative_rounds(curve, reference)) is not None:
                found[curve["setting"], curve["layers"]][curve["cut"]][curve["interval"]].append(rounds)
    return {
        setting: {cut: _between({i: float(np.mean(several)) for i, several in by.items()}) for cut, by in cuts.items()}
        for setting, cuts in found.items()
    }


def _between(measured: dict[int, float]) -> Rounds:
    """Return R between and beyond measured intervals."""
    intervals = sorted(measured)
    x = np.log([1, *intervals])
    y = np.maximum.accumulate(np.log([1, *(measured[interval] for interval in intervals)]))
    slope = max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.05)

    def rounds(interval: FloatArray, _: int) -> FloatArray:
        logs = np.log(interval)
        return np.exp(np.interp(logs, x, y) + slope * np.maximum(logs - x[-1], 0))

    return rounds


def regret(setting: Setting, truth: dict[int, Rounds], believed: Rounds) -> float:
    """Return ln(time of the plan that is chosen, over that of the best), the mean over `DEARER`."""
    cuts = [cut for cut in truth if cut in SECONDS[setting[1]]]
    losses = []
    for dearer in DEARER:
        pairs = [SECONDS[setting[1]][cut] for cut in cuts]
        seconds = np.array([round_s + averaging_s * dearer / INTERVALS for round_s, averaging_s in pairs])
        expected = seconds * np.array([believed(INTERVALS, cut) for cut in cuts])
        real = seconds * np.array([truth[cut](INTERVALS, cut) for cut in cuts])
        losses.append(np.log(real.flat[np.argmin(expected)] / real.min()))
    return float(np.mean(losses))


def estimated(curve: dict[str, Any], rounds: int) -> Rounds:
    """Return R as it is believed after so many rounds of a fixed plan."""
    estimator, losses, interval = RoundsEstimator(curve["layers"]), curve["losses"][:rounds], curve["interval"]
    for start in range(0, len(losses), interval):
        estimator.learn(losses[start : start + interval], interval, curve["cut"])
    return estimator.estimate().model.rounds


def mean_ratio(by_setting: dict[Setting, list[float]]) -> str:
    """Return the geometric mean over settings, and the worst of them."""
    means = [float(np.mean(values)) for values in by_setting.values()]
    return f"{np.exp(np.mean(means)):.2f} ({np.exp(max(means)):.2f})"


def page(curves: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown page."""
    known = truths(curves)
    prior: dict[Setting, list[float]] = {}
    best: dict[Setting, list[float]] = {}
    for setting, truth in known.items():
        before = RoundsEstimator(setting[1]).estimate()
        models = [GrowthRounds(kappa * before.depths, before.power) for kappa in KAPPAS]
        prior[setting] = [regret(setting, truth, before.model.rounds)]
        best[setting] = [min(regret(setting, truth, model.rounds) for model in models)]
    rows = [("the prior alone", [mean_ratio(prior)] * len(SEEN)), ("**estimated**", [])]
    for interval, rounds in SEEN:
        found: dict[Setting, list[float]] = defaultdict(list)
        for curve in curves:
            setting = curve["setting"], curve["layers"]
            if curve["kind"] == "full" and curve["interval"] == interval and setting in known:
                found[setting].append(regret(setting, known[setting], estimated(curve, rounds)))
        rows[1][1].append(mean_ratio(found))
    rows.append(("the best κ of each setting", [mean_ratio(best)] * len(SEEN)))
    header = " | ".join(f"blocks of {i}, {f'{n} rounds' if n < 400 else 'all'}" for i, n in SEEN)
    lines = [
        "# How good are plans that rest on estimated rounds?",
        "",
        "Written by `python benchmarks/calibration.py`, which says what is emulated, from calibration.jsonl. The time",
        f"of the plan that is chosen over that of the best: the geometric mean over {len(known)} settings, and the",
        "worst setting in brackets.",
        "",
        f"| | {header} |",
        "|---|" + "---|" * len(SEEN),
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the results")
    options = parser.parse_args()
    text = (FOLDER / "calibration.jsonl").read_text()
    result = page([json.loads(line) for line in text.splitlines()])
    (options.out / "calibration.md").write_text(result)
    print(result)


if __name__ == "__main__":
    main()
