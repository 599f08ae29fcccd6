"""An experiment as one HTML page that fetches nothing: tables written here, charts drawn by the page's own script.

Names of devices and policies and the recipe's text come from users. They are escaped here, set as text by the script,
and a Content-Security-Policy allows only the script whose hash it names.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from adaptsfl.report.markup import asset, embedded, filled, merged, row, security, settings, table, write_text
from adaptsfl.report.page_data import page_data
from adaptsfl.report.plan_report import seconds
from adaptsfl.report.predicted import PREDICTED_HEADINGS, predicted_rows
from adaptsfl.report.series import Series, group, time_word
from adaptsfl.report.summary import percent, percents, sizes, summary_data, summary_rows, with_spread
from adaptsfl.runs.folder import Run

SCRIPTS = ("chart.js", "overview.js", "detail.js")


def write_page(runs: Sequence[Run], out: str | Path) -> None:
    """Write the page of an experiment to `out`."""
    write_text(page_text(runs), Path(out))


def page_text(runs: Sequence[Run]) -> str:
    """Return the page."""
    members = group(runs)
    summary, time = summary_data(runs), time_word(runs)
    css, script = asset("page.css"), "".join(asset(name) for name in SCRIPTS)
    parts = {
        "policy": security(css, script),
        "title": escape(_title(runs)),
        "css": css,
        "lead": escape(_lead(runs, members)),
        "cards": "".join(
            f"<div><b>{escape(big)}</b><span>{escape(small)}</span></div>" for big, small in _cards(summary, time)
        ),
        "summary": _summary(summary, members),
        "summary_note": escape(_note(summary)),
        "time": time,
        "seconds": time.replace("time", "seconds").capitalize(),
        "predicted": _predicted(runs),
        "runs": _runs(members, time),
        "recipe": _recipe(runs),
        "versions": settings(merged([run.versions for run in runs])),
        "data": embedded(page_data(runs)),
        "js": script,
    }
    return filled(asset("page.html"), parts)


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs if run.name))
    return " · ".join(names[:3]) + (" · …" if len(names) > 3 else "") if names else "Experiment"


def _lead(runs: Sequence[Run], members: Sequence[Series]) -> str:
    seeds, devices = len({run.seed for run in runs}), sorted({len(run.devices) for run in runs})
    layers = sorted({run.costs.layers for run in runs})
    words = [
        _count(len(members), "policy", "policies"),
        _count(seeds, "seed", "seeds"),
        f"{' or '.join(f'{number:,}' for number in devices)} device{'s' if devices != [1] else ''}",
        f"a model of {' or '.join(map(str, layers))} layers",
        f"batches of {' or '.join(map(str, sorted({run.batch_size for run in runs})))}",
    ]
    unfinished = sum(run.status != "done" for run in runs)
    state = "" if not unfinished else f" {unfinished} of {_count(len(runs), 'run', 'runs')} did not finish (see Setup)."
    real = all(run.real for run in runs)
    times = (
        "Times are real: what the deployment took." if real else "Times are virtual: what the fleet would have taken."
    )
    return f"{', '.join(words)}. {times}{state}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _cards(summary: dict[str, Any], time: str) -> Iterator[tuple[str, str]]:
    """Yield a few numbers of the first policy, at the highest target that all its seeds reach."""
    first, *others = summary["policies"]
    reached = [target for target in first["targets"] if target["reached"] == target["of"]]
    if reached:
        last = reached[-1]
        place = first["targets"].index(last)
        yield seconds(last["time_s"]["mean"]), f"{first['label']} to {percent(last['target'])}, in {time}"
        ratios = [(ratio, who["label"]) for who in others if (ratio := who["targets"][place]["speed_up"]) is not None]
        if ratios:
            least, most = min(ratios), max(ratios)
            span = f"{least[0]:.2f}×" if least == most else f"{least[0]:.2f}× – {most[0]:.2f}×"
            against = f"over {least[1]}" if least == most else f"over {least[1]} … {most[1]}"
            yield span, f"speed-up of {first['label']} {against}"
    yield percents(first["final_accuracy"]), f"final accuracy of {first['label']}"
    yield sizes(first["bytes"]), f"sent in {with_spread(first['rounds'], '{:,.0f}'.format)} rounds"


def _note(summary: dict[str, Any]) -> str:
    return (
        "Time and rounds are those of the first evaluation with at least the accuracy; ± is the sample standard "
        f"deviation over seeds. Speed-up is how many times sooner {summary['first']} gets there; it is left out where "
        "a seed does not."
    )


def _summary(summary: dict[str, Any], members: Sequence[Series]) -> str:
    headings, rows = summary_rows(summary)
    lines = []
    for series, (who, *cells) in zip(members, rows, strict=True):
        mark = (
            '<svg class="swatch" width="12" height="12" aria-hidden="true">'
            f'<rect width="12" height="12" rx="2" fill="{series.colour}"/></svg>'
        )
        lines.append(row(mark + _lines(who), map(_lines, cells)))
    return table(headings, lines)


def _lines(text: str) -> str:
    """Return a cell: its first line large, the others small."""
    first, *others = text.split("\n")
    return escape(first) + "".join(f"<small>{escape(line)}</small>" for line in others)


def _predicted(runs: Sequence[Run]) -> str:
    """Return the predicted and the measured seconds of deployments; an empty string for simulations."""
    rows = [row(escape(who), map(escape, cells)) for run in runs for who, *cells in predicted_rows(run)]
    if not rows:
        return ""
    note = '<p class="note">The latency model predicts each block from what was measured before it.</p>'
    scrolled = '<div class="scroll" tabindex="0" role="region" aria-labelledby="h-predicted">'
    return f'<h3 id="h-predicted">Predicted and measured</h3>{scrolled}{table(PREDICTED_HEADINGS, rows)}</div>{note}'


def _runs(members: Sequence[Series], time: str) -> str:
    headings = ("run", "status", "ended by", "rounds", time, "real time", "final accuracy", "best")
    rows = []
    for run in (run for series in members for run in series.runs):
        cells = (
            run.status,
            run.ended_by or "–",
            f"{run.rounds:,}",
            seconds(run.time_s),
            seconds(run.wall_s),
            "–" if run.final_accuracy is None else percent(run.final_accuracy),
            "–" if run.best_accuracy is None else percent(run.best_accuracy),
        )
        rows.append(row(escape(run.folder.resolve().name), map(escape, cells)))
    return table(headings, rows)


def _recipe(runs: Sequence[Run]) -> str:
    """Return the recipe by its sections; a key that differs between runs has all its values."""
    all_settings = merged([dict(_flat(run.recipe)) for run in runs])
    sections: dict[str, dict[str, str]] = {}
    for key, value in all_settings.items():
        section, _, rest = key.partition(".")
        name, entry = (section, rest) if rest else ("", section)
        sections.setdefault(name, {})[entry] = value
    ordered = sorted(sections.items(), key=lambda section: section[0] != "")
    blocks = (f"<div><h4>{escape(name or 'general')}</h4>{settings(entries)}</div>" for name, entries in ordered)
    return f'<div class="recipe">{"".join(blocks)}</div>'


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
