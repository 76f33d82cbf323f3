"""Put the paper's tables and figures beside your own runs: Markdown, PNG and one HTML page.

    python benchmark/report.py runs --out report
    python benchmark/report.py runs/walker-walk__* other_runs --out report

Reads `args.json` and `eval.csv` of run folders, or of all run folders inside a folder. Runs are one
variant if they share --exp-name and every flag that decides what an agent learns; a folder that
cannot be read is skipped with its reason.
"""

import base64
import collections
import csv
import dataclasses
import functools
import html
import io
import json
import re
import sys
import warnings
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import tyro
from rliable import library, metrics

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import mooss_common as common
import rainbow_mooss_atari
import sac_mooss_dmc
import sweep

PAPER = json.loads((HERE / "paper_scores.json").read_text())
AUTHORS = json.loads((HERE / "authors_curves.json").read_text())
TASKS = list(sweep.TASKS)
GAMES = list(sweep.GAMES)
MARKS = (100_000, 500_000)  # where the paper's tables stand
INTERVAL_SEEDS = 3  # fewer have no interval: their values are shown instead
COLOURS = {"base": "#7f7f7f", "mooss": "#1f77b4"}  # other variants take the palette in turn
DASHES = ("-", "--", ":", "-.")
PALETTE = (
    "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
ABLATIONS = {  # key of the paper's numbers: title, {our variant: (row label, the paper's row)}
    "ablation_components": ("Framework components", {
        "base": ("Base, lambda = 0", "base"),
        "L0_p0": ("L = 0, p = 0", "L0_p0"),
        "L6_p0": ("L = 6, p = 0", "L6_p0"),
        "cube": ("L = 6, p = 50% as MLR", "L6_p50_cube"),
        "mooss": ("MOOSS", "mooss")}),
    "ablation_decoder": ("Decoder inputs", {
        "base": ("Base", "base"),
        "decoder_none": ("MOOSS-NoTrans", "no_transformer"),
        "decoder_s": ("MOOSS-S", "state"),
        "decoder_sar": ("MOOSS-SAR", "state_action_reward"),
        "mooss": ("MOOSS", "mooss")}),
    "ablation_depth": ("Decoder depth", {
        "depth1": ("1", "1"), "mooss": ("2 (MOOSS)", "2"), "depth3": ("3", "3"),
        "depth4": ("4", "4")}),
    "ablation_window": ("Temporal window L", {
        "window0": ("0", None), "window2": ("2", None), "window4": ("4", None),
        "mooss": ("6 (MOOSS)", None), "window8": ("8", None)}),
    "ablation_mask_ratio": ("Mask ratio", {
        "mask10": ("10%", None), "mask30": ("30%", None), "mooss": ("50% (MOOSS)", None),
        "mask70": ("70%", None), "mask90": ("90%", None)}),
}
ABLATED_FLAGS = {flag for flags in sweep.VARIANTS.values() for flag in flags}
# What neither changes an agent nor stands in the settings: a column of its own, or no matter.
NO_SETTING = common.FREE_TO_CHANGE | {
    "env_id", "seed", "exp_name", "preset", "eval_every", "eval_episodes", "log_every", "source",
    "provenance"}


@dataclasses.dataclass
class ReportArgs:
    """Put the paper's tables and figures beside your own runs."""

    # run folders, or folders that hold run folders
    runs: tyro.conf.Positional[tuple[str, ...]]
    out: str = "report"  # where report.md, report.html and the pictures go
    bootstrap: int = 2000  # resamples behind an interval


# ----------------------------------------------------------------------------------------- reading
@dataclasses.dataclass
class Run:
    task: str
    name: str  # --exp-name
    seed: int
    atari: bool
    total: int
    settings: dict  # the flags that are not as in the paper's run of this task
    scores: dict  # step -> list of episode returns, of whole evaluations
    hours: dict  # step -> hours since the start
    rank_accuracy: float | None  # mean of the last tenth of train.csv
    provenance: dict
    variant: str = ""  # the name, with a number where it stands for several settings

    @property
    def last(self):
        return max(self.scores)

    @property
    def end(self):
        if self.last < self.total:
            return "stopped"
        return "finished" if self.last >= MARKS[0] else "short"

    @property
    def marks(self):
        """Where it stands in a table: the benchmark's steps, or its own end where it is shorter."""
        passed = [step for step in (MARKS[:1] if self.atari else MARKS) if step in self.scores]
        if self.end == "stopped":
            return [] if self.atari else passed  # Atari's schedules depend on the length
        return passed or [self.last]

    def score(self, step):
        return float(np.mean(self.scores[step]))


def check(condition, reason):
    if not condition:
        raise ValueError(reason)


@functools.cache
def paper_flags(atari, task):
    """The flags of the paper's run of a task, as args.json would hold them."""
    module = rainbow_mooss_atari if atari else sac_mooss_dmc
    flags = dataclasses.asdict(module.fill_presets(module.Args(env_id=task)))
    return json.loads(json.dumps({**flags, "script": module.__name__}))


def read_args(path):
    check(path.stat().st_size < 100_000, "args.json is too large")
    args = json.loads(path.read_text())
    check(isinstance(args, dict), "args.json is not a table of flags")
    for name, letters in (("env_id", "/"), ("exp_name", ""), ("preset", "")):
        good = re.fullmatch(rf"[A-Za-z0-9_.+={letters}-]{{1,100}}", str(args[name]))
        check(good and isinstance(args[name], str), f"its {name} is {args[name]!r}")
    for name in ("seed", "total_timesteps", "eval_episodes"):
        good = type(args[name]) is int and 0 <= args[name] <= 10**12
        check(good, f"its {name} is {args[name]!r}")
    return args


def read_evaluations(path, episodes):
    """Returns and hours of the evaluations that are whole."""
    scores = collections.defaultdict(list)
    hours = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            step = int(row["step"])
            score = float(row["return"])
            hours[step] = float(row["hours"])
            good = 0 <= step <= 10**12 and abs(score) <= 1e12 and 0 <= hours[step] <= 1e6
            check(good, f"eval.csv has a return of {score} after {step} steps and "
                        f"{hours[step]} hours")
            scores[step].append(score)
    whole = {step: scores[step] for step in sorted(scores) if len(scores[step]) >= episodes}
    check(whole, "no evaluation is complete")
    return whole, hours


def read_rank_accuracy(path):
    """Mean of the last tenth of the logged values; None for a run without them, such as Base."""
    if not path.exists():
        return None
    with open(path, newline="") as file:
        rows = csv.DictReader(file)
        words = [row.get("mooss/rank_accuracy") for row in rows]
    values = [float(word) for word in words if word]
    check(all(0 <= value <= 1 for value in values), "train.csv has a rank accuracy outside [0, 1]")
    return float(np.mean(values[-max(1, len(values) // 10):])) if values else None


def read_run(folder):
    args = read_args(folder / "args.json")
    atari = "multi_step" in args
    scores, hours = read_evaluations(folder / "eval.csv", args["eval_episodes"])
    ranked = args.get("temporal_window") != 0  # otherwise there are no pairs
    accuracy = read_rank_accuracy(folder / "train.csv") if ranked else None
    paper = paper_flags(atari, args["env_id"])
    # The length of a DMC run changes nothing in it.
    ignored = NO_SETTING if atari else NO_SETTING | {"total_timesteps"}
    settings = {
        name: value for name, value in sorted(args.items())
        if name not in ignored and (name not in paper or value != paper[name])}
    provenance = args.get("provenance", {})
    check(isinstance(provenance, dict), "its provenance is not a table")
    return Run(args["env_id"], args["exp_name"], args["seed"], atari, args["total_timesteps"],
               settings, scores, hours, accuracy, provenance)


def find_folders(path):
    """A run folder itself, or the folders inside of a folder of runs."""
    try:
        if not path.is_dir() or (path / "args.json").exists():
            return [path]
        inside = [child for child in path.iterdir() if child.is_dir() and child.name != "logs"]
    except OSError:  # which reading it as a run will meet again, and tell
        return [path]
    return sorted(inside) or [path]


def read_runs(paths):
    """All runs below the paths, and the folders that were skipped with their reasons."""
    runs = {}
    skipped = []
    for folder in [folder for path in paths for folder in find_folders(Path(path))]:
        try:
            run = read_run(folder)
        except FileNotFoundError as error:
            skipped.append((str(folder), f"no {Path(error.filename).name}"))
            continue
        except (OSError, LookupError, TypeError, ValueError, RecursionError, csv.Error) as error:
            reason = f"{type(error).__name__}: {error}"
            skipped.append((str(folder), "not a run of these scripts: " + shorten(reason, 200)))
            continue
        key = (run.task, run.name, run.seed, json.dumps(run.settings))
        first, _ = runs.setdefault(key, (folder, run))
        if first.resolve() != folder.resolve():
            skipped.append((str(folder), f"the same settings, task and seed as {first}"))
    runs = [run for _, run in runs.values()]
    name_variants(runs)
    return sorted(runs, key=lambda run: (run.atari, run.task, run.variant, run.seed)), skipped


def name_variants(runs):
    """Tell apart what was run under one name with different settings."""
    known = collections.defaultdict(set)
    for run in runs:
        known[run.atari, run.name].add(json.dumps(run.settings))
    for run in runs:
        several = sorted(known[run.atari, run.name], key=lambda text: (len(text), text))
        number = several.index(json.dumps(run.settings)) + 1
        run.variant = f"{run.name} #{number}" if len(several) > 1 else run.name


def shorten(value, length=80):
    text = str(value)
    return text if len(text) <= length else text[:length - 3] + "..."


def describe(settings):
    words = [f"{name} {shorten(value)}" for name, value in settings.items()]
    return shorten(", ".join(words) or "nothing", 1000)


# ----------------------------------------------------------------------------------------- numbers
def human_normalised(game, score):
    low = PAPER["atari100k"][game]["Random"]
    high = PAPER["atari100k"][game]["Human"]
    return (score - low) / (high - low)


def estimates(matrix, functions, resamples, digits):
    """A cell for each function of a (seeds, tasks) matrix, by rliable.

    With a stratified-bootstrap 95% interval, or, for too few seeds, with the value of each.
    """
    def values(scores):
        return np.array([function(scores) for function in functions])

    if len(matrix) < INTERVAL_SEEDS:
        each = np.array([values(seed[None]) for seed in matrix])  # (seeds, functions)
        return [", ".join(f"{x:.{digits}f}" for x in column) for column in each.T]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the bootstrap library below rliable
        points, intervals = library.get_interval_estimates(
            {"x": matrix}, values, reps=resamples, random_state=np.random.RandomState(0))
    return [f"{point:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
            for point, (low, high) in zip(points["x"], intervals["x"].T)]


def seed_matrix(by_task):
    """(seeds, tasks): as many seeds of each task as the task with the fewest has."""
    count = min(len(values) for values in by_task)
    return np.array([values[:count] for values in by_task]).T


def bootstrap_interval(values, resamples=2000):
    """Bootstrap 95% interval of the mean over the first axis."""
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    return np.percentile(values[draws].mean(1), [2.5, 97.5], axis=0)


def group(runs, step):
    """{variant: {task: [(score of a seed, number of episodes), ...]}} at a step."""
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if step in run.marks:
            cells[run.variant][run.task].append((run.score(step), len(run.scores[step])))
    return cells


def cell(entries):
    """Mean and standard deviation over seeds, or a few seeds' values, and what stands behind."""
    if not entries:
        return "missing"
    scores = [score for score, _ in entries]
    text = ", ".join(f"{score:.1f}" for score in scores)
    if len(scores) >= INTERVAL_SEEDS:
        text = f"{np.mean(scores):.1f} ± {np.std(scores):.1f}"
    episodes = "/".join(str(number) for number in sorted({number for _, number in entries}))
    return f"{text} ({len(entries)} x {episodes})"


def published(entry):
    return f"{entry['mean']:.0f} ± {entry['std']:.0f}" if entry else "-"


def order(variants):
    """Base and MOOSS first, the rest by name."""
    first = {"base": 0, "mooss": 1}
    return sorted(variants, key=lambda name: (first.get(name.split(" #")[0], 2), name))


def same_tasks(cells, variants, tasks):
    """[(tasks, variants that have exactly these)]: only such variants may be ranked."""
    sets = collections.defaultdict(list)
    for variant in variants:
        sets[tuple(task for task in tasks if cells[variant].get(task))].append(variant)
    return sorted((item for item in sets.items() if len(item[0]) > 1), key=lambda x: -len(x[0]))


# ------------------------------------------------------------------------------------ the document
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1340px; margin: 2em auto; padding: 0 1em;
       color: #222 }
p { max-width: 60em }
h2 { margin-top: 2em }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { border: 1px solid #ddd; padding: 4px 8px; text-align: right }
td:first-child, th:first-child, .text { text-align: left }
.text { overflow-wrap: anywhere }
tr:nth-child(even) { background: #f7f7f7 }
th { background: #eef2f7 }
img { max-width: 100% }
figcaption { color: #555; font-size: 13px }
"""
COLUMNS = 13  # as many as fit the page


def plain(value):
    """One line of text that every encoding carries."""
    text = re.sub(r"\s+", " ", str(value))
    return text.encode("utf-8", "backslashreplace").decode()


def escape_html(value):
    return html.escape(plain(value))


def escape_markdown(value):
    text = html.escape(plain(value), quote=False)
    return re.sub(r"([\\`*|$~])|(?<=\])(?=\()", r"\\\1", text)


class Document:
    """Blocks that become Markdown and HTML."""

    def __init__(self, out):
        self.out = Path(out)
        self.blocks = []
        self.out.mkdir(parents=True, exist_ok=True)

    def heading(self, text):
        self.blocks.append(("heading", text))

    def text(self, text):
        self.blocks.append(("text", text))

    def table(self, header, rows):
        """What is too wide goes on in further tables that repeat the first column."""
        for start in range(1, len(header), COLUMNS - 1):
            lines = [[line[0], *line[start:start + COLUMNS - 1]] for line in (header, *rows)]
            self.blocks.append(("table", lines))

    def figure(self, name, figure, caption):
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=130, bbox_inches="tight")
        plt.close(figure)
        (self.out / f"{name}.png").write_bytes(buffer.getvalue())
        self.blocks.append(("figure", (name, buffer.getvalue(), caption)))

    def markdown(self):
        parts = ["# MOOSS: report"]
        for kind, content in self.blocks:
            if kind == "heading":
                parts.append(f"## {escape_markdown(content)}")
            elif kind == "text":
                parts.append(escape_markdown(content))
            elif kind == "table":
                header, *rows = [list(map(escape_markdown, line)) for line in content]
                lines = [header, ["---"] * len(header), *rows]
                parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
            else:
                name, _, caption = content
                caption = escape_markdown(caption)
                parts.append(f"![{caption}]({name}.png)\n\n*{caption}*")
        return "\n\n".join(parts) + "\n"

    def page(self):
        parts = []
        for kind, content in self.blocks:
            if kind == "heading":
                parts.append(f"<h2>{escape_html(content)}</h2>")
            elif kind == "text":
                parts.append(f"<p>{escape_html(content)}</p>")
            elif kind == "table":
                parts.append(html_table(content))
            else:
                _, png, caption = content
                caption = escape_html(caption)
                data = base64.b64encode(png).decode()
                parts.append(f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                             f"<figcaption>{caption}</figcaption></figure>")
        head = ('<meta charset="utf-8"><title>MOOSS: report</title>'
                f'<link rel="icon" href="data:,"><style>{STYLE}</style>')
        body = "<h1>MOOSS: report</h1>" + "\n".join(parts)
        return (f'<!doctype html><html lang="en"><head>{head}</head>'
                f"<body>{body}</body></html>\n")

    def write(self):
        (self.out / "report.md").write_text(self.markdown(), encoding="utf-8")
        (self.out / "report.html").write_text(self.page(), encoding="utf-8")


def html_table(lines):
    rows = []
    for number, line in enumerate(lines):
        tag = "td" if number else "th"
        cells = []
        for value in map(str, line):
            # What is no number may break anywhere, so that no table is wider than the page.
            long = len(value) > 30 or max(map(len, value.split()), default=0) > 18
            kind = ' class="text"' if long else ""
            cells.append(f"<{tag}{kind}>{escape_html(value)}</{tag}>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


# ---------------------------------------------------------------------------------------- sections
def variants_section(document, runs):
    """What each variant really is."""
    document.heading("Variants")
    document.text("Every flag in which a variant is not the paper's run of its task; what only "
                  "touches where a run runs is left out.")
    members = collections.defaultdict(list)
    for run in runs:
        members["Atari" if run.atari else "DMC", run.variant].append(run)
    rows = []
    for suite, variant in sorted(members, key=lambda key: (key[0] == "Atari", key)):
        known = members[suite, variant]
        tasks = sorted({run.task for run in known})
        rows.append([variant, suite, ", ".join(tasks), describe(known[0].settings)])
    document.table(["variant", "suite", "tasks", "differs from the paper in"], rows)


def runs_section(document, runs):
    """At what size each run was made, for how long, and where it ended."""
    document.heading("Runs")
    document.text(
        f"End: a run that is finished reached the benchmark's {MARKS[0]:,} steps and its own "
        "--total-timesteps, a short one only the latter; one that stopped, or is still running, "
        "reached neither end. Return: mean of the last evaluation, with the bootstrap 95% "
        "interval over its episodes where there are ten or more. Rank accuracy: mean over the "
        "last tenth of training; chance is 0.5.")
    rows = []
    for run in runs:
        returns = np.array(run.scores[run.last])
        interval = "-"
        if len(returns) >= 10:
            interval = "[{:.1f}, {:.1f}]".format(*bootstrap_interval(returns))
        accuracy = "-" if run.rank_accuracy is None else f"{run.rank_accuracy:.2f}"
        end = f"stopped before {run.total:,}" if run.end == "stopped" else run.end
        rows.append([run.task, run.variant, run.seed, f"{run.last:,}", end,
                     f"{run.hours[run.last]:.1f}", len(returns), f"{returns.mean():.1f}",
                     interval, accuracy])
    document.table(["task", "variant", "seed", "steps", "end", "hours", "episodes", "return",
                    "interval", "rank accuracy"], rows)
    known = [run for run in runs if run.provenance]
    if known:
        document.text("Where they come from:")
        names = ("hardware", "python", "torch", "gymnasium", "mujoco", "ale-py", "command")
        document.table(["task", "variant", "seed", "commit", *names], [
            [run.task, run.variant, run.seed, commit(run.provenance),
             *(shorten(run.provenance.get(name) or "-", 300) for name in names)]
            for run in known])


def commit(provenance):
    changed = " with changes" if provenance.get("dirty") else ""
    return shorten(provenance.get("commit") or "-", 10) + changed


def dmc_section(document, runs, step, resamples):
    cells = group([run for run in runs if ablation_row(run) in (None, "base", "mooss")], step)
    if not cells:
        return
    variants = order(cells)
    suffix = {100_000: "100k", 500_000: "500k"}.get(step)
    table = PAPER.get(f"dmc{suffix}", {})
    hard = PAPER["dmc_hard"].get(suffix, {})
    columns = list(reversed(table[TASKS[0]])) if table else []  # MOOSS first
    document.heading(f"DeepMind Control, {step:,} environment steps")
    if columns:
        document.text(
            "Columns marked (paper) are the published ones, at full size: MOOSS (paper) at 100k is "
            "one run a task, its spread being over the 10 episodes of that run; Base (paper) is "
            "MLR's baseline.")
    document.text("Ours: mean ± standard deviation over seeds of a seed's mean (seeds x episodes "
                  f"each); the means themselves where there are fewer than {INTERVAL_SEEDS} seeds.")
    present = {task for variant in variants for task in cells[variant]}
    tasks = [task for task in TASKS if table or task in present] + sorted(present - set(TASKS))
    rows = []
    for task in tasks:
        paper = table.get(task) or hard.get(task) or {}
        rows.append([task, *(cell(cells[variant].get(task)) for variant in variants),
                     *(published(paper.get(name)) for name in columns)])
    document.table(["task", *variants, *(f"{name} (paper)" for name in columns)], rows)
    functions = (metrics.aggregate_mean, metrics.aggregate_median, metrics.aggregate_iqm)
    for shared, members in same_tasks(cells, variants, tasks):
        rows = []
        for variant in members:
            matrix = seed_matrix([[score for score, _ in cells[variant][task]] for task in shared])
            shape = "{} x {}".format(*matrix.shape)
            rows.append([variant, *estimates(matrix, functions, resamples, 1), shape])
        document.text(f"Over the {len(shared)} tasks {', '.join(shared)} (intervals: stratified "
                      "bootstrap over seeds, 95%):")
        document.table(["over tasks", "mean", "median", "IQM", "seeds x tasks"], rows)


def atari_section(document, runs, step, resamples):
    cells = group(runs, step)
    variants = order(cells)
    document.heading(f"Atari, {step:,} interactions")
    document.text(
        "Raw scores; ours: mean ± standard deviation over seeds (seeds x games each), the seeds' "
        f"own scores where there are fewer than {INTERVAL_SEEDS}. What says (paper) is published, "
        "at full size after 100,000 interactions.")
    columns = ["MOOSS", "Base", "MLR", "Random", "Human"]
    present = {task for variant in variants for task in cells[variant]}
    games = [game for game in GAMES if step == MARKS[0] or game in present]
    games += sorted(present - set(GAMES))
    rows = []
    for game in games:
        paper = PAPER["atari100k"].get(game, {})
        rows.append([game, *(cell(cells[variant].get(game)) for variant in variants),
                     *(paper.get(name, "-") for name in columns)])
    document.table(["game", *variants, *(f"{name} (paper)" for name in columns)], rows)

    document.text("Human-normalised, over games that all rows of a table share; intervals: "
                  "stratified bootstrap over seeds, 95% (rliable). The published scores, means "
                  "over seeds, give the published aggregates of MLR and MOOSS to 0.005, but not "
                  "those of Base.")
    sets = dict(same_tasks(cells, variants, GAMES))
    for number, shared in enumerate({tuple(GAMES): None, **sets}):
        profiles = aggregate_atari(document, cells, sets.get(shared, []), shared, resamples)
        if profiles:
            name = f"atari_profiles_{step}" + (f"_{number}" if number else "")
            document.figure(name, draw_profiles(profiles, resamples), "Performance profiles over "
                            f"{', '.join(shared)}; bands: 95%.")


def aggregate_atari(document, cells, variants, games, resamples):
    """A table over the games, the paper's scores of the same games in it; our matrices."""
    functions = (metrics.aggregate_iqm, metrics.aggregate_optimality_gap)
    rows = []
    for name in ("MLR", "Base", "MOOSS"):
        if len(games) == len(GAMES):
            values = [PAPER["atari100k"][key][name] for key in ("_iqm", "_optimality_gap")]
            rows.append([f"{name} (paper)", *values, "3 x 26"])
        scores = [human_normalised(game, PAPER["atari100k"][game][name]) for game in games]
        rows.append([f"{name}, from its scores (paper)",
                     *estimates(np.array([scores]), functions, 1, 3), f"1 x {len(games)}"])
    matrices = {}
    for variant in variants:
        scores = [[human_normalised(game, score) for score, _ in cells[variant][game]]
                  for game in games]
        matrix = matrices[variant] = seed_matrix(scores)
        shape = "{} x {}".format(*matrix.shape)
        rows.append([variant, *estimates(matrix, functions, resamples, 3), shape])
    names = f"{len(games)} games" + (f" ({', '.join(games)})" if len(games) < len(GAMES) else "")
    document.text(f"Over {names}:")
    document.table(["human-normalised", "IQM", "optimality gap", "seeds x games"], rows)
    return matrices


def draw_profiles(matrices, resamples):
    taus = np.linspace(0, 2, 81)
    shares, intervals = library.create_performance_profile(
        matrices, taus, reps=min(resamples, 2000))
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for variant, matrix in matrices.items():
        line, = axes.plot(taus, shares[variant], label=variant, color=COLOURS.get(variant))
        if len(matrix) >= INTERVAL_SEEDS:
            axes.fill_between(taus, *intervals[variant], alpha=0.2, color=line.get_color())
    axes.set(xlabel="human-normalised score", ylabel="share of runs above", ylim=(0, 1))
    legend_below(axes)
    return figure


def legend_below(axes):
    """A legend that covers no curve."""
    axes.legend(fontsize=10, ncols=2, columnspacing=1, handlelength=1.5, frameon=False,
                loc="upper center", bbox_to_anchor=(0.5, -0.15))


def curves_section(document, runs):
    """Learning curves over steps and over hours, the authors' behind."""
    by_task = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if len(run.scores) > 1:
            by_task[run.task][run.variant].append(run)
    if not by_task:
        return
    document.heading("Learning curves")
    looks = choose_looks({name for variants in by_task.values() for name in variants})
    caption = ("Mean evaluation return over {}; bands: 95% bootstrap over seeds, a line for each "
               f"seed where there are fewer than {INTERVAL_SEEDS}.")
    for axis in ("steps", "hours"):
        columns = min(3, len(by_task))
        height = -(-len(by_task) // columns)
        figure, grid = plt.subplots(height, columns, figsize=(5 * columns, 4 * height),
                                    squeeze=False, layout="constrained")
        for axes in grid.flat[len(by_task):]:
            axes.axis("off")
        for axes, (task, variants) in zip(grid.flat, sorted(by_task.items())):
            if axis == "steps" and task in AUTHORS:
                axes.plot([point["env_step"] for point in AUTHORS[task]],
                          [point["mean"] for point in AUTHORS[task]],
                          color="#d9a441", linewidth=1, label="authors' MOOSS (one run)")
            for variant in order(variants):
                draw_curves(axes, axis, variants[variant], looks[variant])
            atari = next(iter(variants.values()))[0].atari
            unit = "interactions" if atari else "environment steps"
            axes.set(title=task, xlabel=unit if axis == "steps" else "hours", ylabel="return")
            legend_below(axes)
        note = " The authors' curves are one run a task." if axis == "steps" else ""
        document.figure(f"curves_{axis}", figure, caption.format(axis) + note)


def choose_looks(variants):
    """Colour and line of each variant: `base_b512` has the colour of `base`, with other dashes."""
    looks = {}
    used = collections.Counter()
    for name in order(variants):
        kind = re.split("[_ ]", name)[0]
        if kind not in COLOURS:
            kind = "other"
        number = used[kind]
        used[kind] += 1
        if kind == "other":
            looks[name] = {"color": PALETTE[number % len(PALETTE)]}
        else:
            looks[name] = {"color": COLOURS[kind], "linestyle": DASHES[number % len(DASHES)]}
    return looks


def draw_curves(axes, axis, runs, look):
    """The mean of the runs of a variant with its band, or a line for each of a few."""
    stopped = sum(run.end == "stopped" for run in runs)
    label = f"{runs[0].variant} ({len(runs)} seed{'s' * (len(runs) > 1)}"
    label += f", {stopped} stopped)" if stopped else ")"
    shared = sorted(set.intersection(*(set(run.scores) for run in runs)))
    if len(runs) < INTERVAL_SEEDS or len(shared) < 2:
        for number, run in enumerate(runs):
            x = [step if axis == "steps" else run.hours[step] for step in run.scores]
            y = [run.score(step) for step in run.scores]
            axes.plot(x, y, **look, label=None if number else label)
        return
    values = np.array([[run.score(step) for step in shared] for run in runs])  # (seeds, steps)
    x = shared
    if axis == "hours":
        x = [np.mean([run.hours[step] for run in runs]) for step in shared]
    axes.plot(x, values.mean(0), **look, label=label)
    axes.fill_between(x, *bootstrap_interval(values), alpha=0.2, color=look["color"])


def ablation_row(run):
    """The row of the ablation tables that a run stands in: its name and its flags both say so."""
    if run.atari or run.name not in sweep.VARIANTS:
        return None
    paper = paper_flags(run.atari, run.task)
    flags = {k: v for k, v in sweep.VARIANTS[run.name].items() if v != paper[k]}
    return run.name if flags == {k: v for k, v in run.settings.items() if k in ABLATED_FLAGS} \
        else None


def ablation_sections(document, runs):
    """The paper's ablation tables at up to 100k steps, for each set of sizes that was run."""
    by_sizes = collections.defaultdict(list)
    for run in runs:
        if ablation_row(run):
            sizes = {k: v for k, v in run.settings.items() if k not in ABLATED_FLAGS}
            by_sizes[describe(sizes)].append(dataclasses.replace(run, variant=run.name))
    for number, (sizes, members) in enumerate(sorted(by_sizes.items())):
        for step in sorted({step for run in members for step in run.marks if step <= MARKS[0]}):
            cells = group(members, step)
            for key, (title, variants) in ABLATIONS.items():
                if any(cells.get(name) for name in variants if name not in ("base", "mooss")):
                    document.heading(f"Ablation: {title} ({step:,} steps)")
                    document.text(f"Ours, apart from what is ablated, differ from the paper's "
                                  f"runs in: {sizes}.")
                    suffix = f"_{step}_{number}" if number or step != MARKS[0] else ""
                    ablation_table(document, cells, key, title, variants, key + suffix)


def ablation_table(document, cells, key, title, variants, picture):
    """The paper's rows beside ours; means are over the tasks that all our rows have."""
    numbers = PAPER.get(key, {})
    ours = [name for name in variants if cells.get(name)]
    shared = [task for task in TASKS if all(cells[name].get(task) for name in ours)]
    if numbers:
        document.text("Rows marked paper are the published ones, at full size after 100,000 steps.")
    if key == "ablation_mask_ratio":
        document.text("The paper's figure does not give its mask ratios; these are ours.")
    if len(shared) < len(TASKS):
        document.text("Mean and median, the paper's too, are over the tasks that all our variants "
                      f"here have: {', '.join(shared) or 'none'}.")
    elif "L6_p0" in numbers:
        mean = np.mean([numbers["L6_p0"][task]["mean"] for task in TASKS])
        document.text("The printed mean of L = 6, p = 0 is not the mean of its cells, which is "
                      f"{mean:.1f}.")
    rows = []
    means = {}
    for variant, (label, paper_row) in variants.items():
        tail = ["missing", "missing"]
        if variant in ours and shared:
            scores = [np.mean([score for score, _ in cells[variant][task]]) for task in shared]
            means[label] = np.mean(scores)
            tail = [f"{means[label]:.1f}", f"{np.median(scores):.1f}"]
        known = cells.get(variant, {})
        rows.append([f"{label}, ours", *(cell(known.get(task)) for task in TASKS), *tail])
        entry = numbers.get(paper_row)
        if entry:
            tail = [entry.get(f"_{name}", entry.get(name, "-")) for name in ("mean", "median")]
            if len(shared) < len(TASKS):
                scores = [entry[task]["mean"] for task in shared if entry.get(task)]
                tail = [f"{function(scores):.1f}" if scores and len(scores) == len(shared) else "-"
                        for function in (np.mean, np.median)]
            cells_of_paper = [published(entry.get(task)) for task in TASKS]
            rows.append([f"{label}, paper", *cells_of_paper, *tail])
    document.table(["variant", *TASKS, "mean", "median"], rows)
    if key in ("ablation_window", "ablation_mask_ratio") and means:
        figure, axes = plt.subplots(figsize=(5, 3))
        axes.plot(list(means), list(means.values()), marker="o", color=COLOURS["mooss"])
        axes.set(xlabel=title, ylabel="mean over tasks")
        document.figure(picture, figure, f"{title}: mean over {', '.join(shared)}.")


def build(document, runs, skipped, resamples):
    """All sections, from the paper's tables to the folders that were skipped."""
    ends = collections.Counter(run.end for run in runs)
    counts = ", ".join(f"{ends[end]} {end}" for end in ("finished", "short", "stopped"))
    tasks = {run.task for run in runs}
    document.text(f"Runs: {len(runs)} ({counts}). Tasks: {len(tasks)}. "
                  f"Folders skipped: {len(skipped)}.")
    variants_section(document, runs)
    dmc = [run for run in runs if not run.atari]
    atari = [run for run in runs if run.atari]
    steps = collections.Counter(step for run in dmc for step in run.marks)
    for step in sorted(steps):
        # A run with an end of its own stands in the list of runs alone.
        if step in MARKS or steps[step] > 1:
            dmc_section(document, dmc, step, resamples)
    for step in sorted({step for run in atari for step in run.marks}):
        atari_section(document, atari, step, resamples)
    ablation_sections(document, dmc)
    curves_section(document, runs)
    runs_section(document, runs)
    if skipped:
        document.heading("Skipped")
        document.table(["folder", "reason"], skipped)


def main(argv=None):
    args = tyro.cli(ReportArgs, args=argv)
    common.require(0 < args.bootstrap <= 10**6, f"--bootstrap {args.bootstrap} is out of range: "
                   "it must be between 1 and 1000000")
    runs, skipped = read_runs(args.runs)
    for folder, reason in skipped:
        print(f"skipped {plain(folder)}: {plain(reason)}", file=sys.stderr)
    common.require(runs, f"no run with a whole evaluation in {plain(', '.join(args.runs))}")
    try:
        document = Document(args.out)
        build(document, runs, skipped, args.bootstrap)
        document.write()
    except OSError as error:
        raise common.UsageError(f"cannot write to {args.out}: {error.strerror}") from error
    print(f"wrote {document.out / 'report.html'} and report.md: {len(runs)} runs, "
          f"{len(skipped)} folders skipped")
    return 0


if __name__ == "__main__":
    common.exit_with(main)
