"""Put the paper's tables and figures beside your own runs: Markdown, PNG and one self-contained HTML page.

    python benchmark/report.py runs --out report
    python benchmark/report.py runs/walker-walk__* other_runs --out report

Reads `args.json` and `eval.csv` of run folders, or of all run folders inside a folder; a run's variant is its
--exp-name.
"""

import base64
import collections
import csv
import dataclasses
import html
import io
import json
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
PAPER = json.loads((HERE / "paper_scores.json").read_text())
AUTHORS = json.loads((HERE / "authors_curves.json").read_text())
TASKS = list(PAPER["dmc100k"])[:6]
GAMES = [game for game in PAPER["atari100k"] if game[0] != "_"]
MARKS = (100_000, 500_000)  # where the paper's tables stand
COLOURS = {"base": "#7f7f7f", "mooss": "#1f77b4"}  # other variants take the rest of the palette in turn
PALETTE = ("#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#bcbd22")
ABLATIONS = {  # title, key of the paper's numbers, {our variant: (row label, the paper's row)}
    "ablation_components": ("Framework components", {
        "base": ("Base, lambda = 0", "base"), "L0_p0": ("L = 0, p = 0", "L0_p0"), "L6_p0": ("L = 6, p = 0", "L6_p0"),
        "cube": ("L = 6, p = 50% as MLR", "L6_p50_cube"), "mooss": ("MOOSS", "mooss")}),
    "ablation_decoder": ("Decoder inputs", {
        "base": ("Base", "base"), "decoder_none": ("MOOSS-NoTrans", "no_transformer"),
        "decoder_s": ("MOOSS-S", "state"),
        "decoder_sar": ("MOOSS-SAR", "state_action_reward"), "mooss": ("MOOSS", "mooss")}),
    "ablation_depth": ("Decoder depth", {
        "depth1": ("1", "1"), "mooss": ("2 (MOOSS)", "2"), "depth3": ("3", "3"), "depth4": ("4", "4")}),
    "ablation_window": ("Temporal window L", {
        "window0": ("0", None), "window2": ("2", None), "window4": ("4", None), "mooss": ("6 (MOOSS)", None),
        "window8": ("8", None)}),
    "ablation_mask_ratio": ("Mask ratio", {
        "mask10": ("10%", None), "mask30": ("30%", None), "mooss": ("50% (MOOSS)", None), "mask70": ("70%", None),
        "mask90": ("90%", None)}),
}


@dataclasses.dataclass
class ReportArgs:
    """Put the paper's tables and figures beside your own runs."""

    runs: tyro.conf.Positional[tuple[str, ...]]  # run folders, or folders that hold run folders
    out: str = "report"  # where report.md, report.html and the pictures go
    bootstrap: int = 2000  # resamples behind an interval


# ------------------------------------------------------------------------------------------------- reading
@dataclasses.dataclass
class Run:
    task: str
    variant: str
    seed: int
    atari: bool
    preset: str
    total: int
    scores: dict  # step -> list of episode returns
    hours: dict  # step -> hours since the start
    rank_accuracy: float | None  # mean of the last tenth of train.csv

    def score(self, step):
        return float(np.mean(self.scores[step]))


def read_run(path):
    """A finished run, or the reason why this folder is none."""
    try:
        args = json.loads((path / "args.json").read_text())
        with open(path / "eval.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        scores, hours = collections.defaultdict(list), {}
        for row in rows:
            scores[int(row["step"])].append(float(row["return"]))
            hours[int(row["step"])] = float(row["hours"])
        accuracy = read_rank_accuracy(path / "train.csv") if args.get("temporal_window") != 0 else None  # no pairs
        run = Run(args["env_id"], args["exp_name"], args["seed"], "multi_step" in args, args["preset"],
                  args["total_timesteps"], dict(scores), hours, accuracy)
        whole = [step for step, returns in scores.items() if len(returns) >= args["eval_episodes"]]
    except FileNotFoundError as error:
        return f"no {Path(error.filename).name}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"not a run of these scripts ({type(error).__name__}: {error})"
    last = max(run.scores, default=0)
    if last in whole and last >= run.total:
        return run
    marks = [step for step in MARKS if step in whole and not run.atari]  # a run to 500k stands at 100k on its way
    if not marks:
        return f"incomplete: step {last:,} of {run.total:,}"
    return dataclasses.replace(run, scores={step: scores[step] for step in scores if step <= max(marks)})


def read_rank_accuracy(path):
    """Mean of the last tenth of the logged values; None for a run without them, such as Base."""
    if not path.exists():
        return None
    with open(path, newline="") as file:
        values = [float(row["mooss/rank_accuracy"]) for row in csv.DictReader(file) if row.get("mooss/rank_accuracy")]
    return float(np.mean(values[-max(1, len(values) // 10):])) if values else None


def read_runs(paths):
    """All finished runs below the paths, and the folders that were skipped with their reasons."""
    runs, skipped = {}, []
    for path in map(Path, paths):
        inside = sorted(child for child in path.iterdir() if child.is_dir() and child.name not in ("logs",)) \
            if path.is_dir() and not (path / "args.json").exists() else []
        for folder in inside or [path]:
            run = read_run(folder)
            if isinstance(run, str):
                skipped.append((str(folder), run))
                continue
            first, _ = runs.setdefault((run.preset, run.task, run.variant, run.seed), (folder, run))
            if first.resolve() != folder.resolve():
                skipped.append((str(folder), f"the same preset, task, variant and seed as {first}"))
    return [run for _, run in runs.values()], skipped


def report_steps(run):
    """The steps at which a run stands in a table: the benchmark's, or its own end where it is shorter."""
    marks = MARKS[:1] if run.atari else MARKS
    return [step for step in marks if step in run.scores] or [max(run.scores)]


# ------------------------------------------------------------------------------------------------- numbers
def spread(values):
    return f"{np.mean(values):.1f} ± {np.std(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def human_normalised(game, score):
    low, high = PAPER["atari100k"][game]["Random"], PAPER["atari100k"][game]["Human"]
    return (score - low) / (high - low)


def aggregate(matrix, functions, resamples, seed=0):
    """Point estimates and stratified-bootstrap 95% intervals of a (runs, tasks) matrix, by rliable."""
    def values(scores):
        return np.array([function(scores) for function in functions])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the bootstrap library below rliable
        points, intervals = library.get_interval_estimates({"x": matrix}, values, reps=resamples,
                                                           random_state=np.random.RandomState(seed))
    return points["x"], intervals["x"]


def estimates(matrix, functions, resamples, digits):
    """The cells of `aggregate`: a single seed has no interval."""
    points, intervals = aggregate(matrix, functions, resamples)
    return [f"{p:.{digits}f}" + f" [{low:.{digits}f}, {high:.{digits}f}]" * (len(matrix) > 1)
            for p, (low, high) in zip(points, intervals.T)]


def seed_matrix(by_task):
    """(runs, tasks): as many runs of each task as the task with the fewest has, for a balanced bootstrap."""
    count = min(len(values) for values in by_task.values())
    return np.array([values[:count] for values in by_task.values()]).T


def band(curves, resamples=1000):
    """Mean over seeds and its bootstrap 95% interval, at the steps that all seeds share."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[step] for step in shared] for curve in curves])  # (seeds, steps)
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(resamples, len(values)))].mean(1)
    return np.array(shared), values.mean(0), *np.percentile(means, [2.5, 97.5], axis=0)


# ------------------------------------------------------------------------------------------------- the document
class Document:
    """Blocks that become Markdown and HTML."""

    def __init__(self, out):
        self.out, self.blocks, self.suffix = Path(out), [], ""
        self.out.mkdir(parents=True, exist_ok=True)

    def heading(self, text):
        self.blocks.append(("heading", text))

    def text(self, text):
        self.blocks.append(("text", text))

    def table(self, header, rows):
        self.blocks.append(("table", header, rows))

    def figure(self, name, figure, caption):
        name, buffer = name + self.suffix, io.BytesIO()
        figure.savefig(buffer, dpi=130, bbox_inches="tight")
        plt.close(figure)
        (self.out / f"{name}.png").write_bytes(buffer.getvalue())
        self.blocks.append(("figure", name, buffer.getvalue(), caption))

    def markdown(self):
        parts = ["# MOOSS: report"]
        for kind, *block in self.blocks:
            if kind == "heading":
                parts.append(f"## {block[0]}")
            elif kind == "text":
                parts.append(block[0])
            elif kind == "table":
                header, rows = block
                lines = [header, ["---"] * len(header), *rows]
                parts.append("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))
            else:
                parts.append(f"![{block[2]}]({block[0]}.png)\n\n*{block[2]}*")
        return "\n\n".join(parts) + "\n"

    def page(self):
        style = ("body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
                 "table{border-collapse:collapse;margin:1em 0;font-size:13px;display:block;overflow-x:auto}"
                 "td,th{border:1px solid #ddd;padding:4px 9px;text-align:right;white-space:nowrap}"
                 "td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f7f7f7}"
                 "th{background:#eef2f7}img{max-width:100%}figcaption{color:#555;font-size:13px}h2{margin-top:2em}")
        parts = []
        for kind, *block in self.blocks:
            if kind == "heading":
                parts.append(f"<h2>{html.escape(block[0])}</h2>")
            elif kind == "text":
                parts.append(f"<p>{html.escape(block[0])}</p>")
            elif kind == "table":
                lines = [(tag, line) for tag, part in zip(("th", "td"), ([block[0]], block[1])) for line in part]
                parts.append("<table>" + "".join("<tr>" + "".join(
                    f"<{tag}>{html.escape(str(value))}</{tag}>" for value in line) + "</tr>" for tag, line in lines)
                    + "</table>")
            else:
                data = base64.b64encode(block[1]).decode()
                caption = html.escape(block[2])
                parts.append(f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                             f"<figcaption>{caption}</figcaption></figure>")
        return ('<!doctype html><html lang="en"><head><meta charset="utf-8"><title>MOOSS: report</title>'
                f'<link rel="icon" href="data:,"><style>{style}</style></head><body><h1>MOOSS: report</h1>'
                + "\n".join(parts) + "</body></html>\n")

    def write(self):
        (self.out / "report.md").write_text(self.markdown())
        (self.out / "report.html").write_text(self.page())


# ------------------------------------------------------------------------------------------------- sections
def runs_section(document, runs):
    """What was run, at what size, for how long, and where each run ended."""
    document.heading("Runs")
    document.text("Return: mean of the last evaluation, with the bootstrap 95% interval over its episodes where there "
                  "are ten or more. Rank accuracy: mean over the last tenth of training; chance is 0.5.")
    rows = []
    for run in sorted(runs, key=lambda run: (run.atari, run.task, run.variant, run.seed)):
        last = max(run.scores)
        returns = np.array(run.scores[last])
        draws = np.random.default_rng(0).integers(len(returns), size=(2000, len(returns)))  # no row depends on others
        means = returns[draws].mean(1)
        interval = "[{:.1f}, {:.1f}]".format(*np.percentile(means, [2.5, 97.5])) if len(returns) >= 10 else "-"
        accuracy = "-" if run.rank_accuracy is None else f"{run.rank_accuracy:.2f}"
        rows.append([run.task, run.variant, run.seed, run.preset, f"{last:,}", f"{run.hours[last]:.1f}", len(returns),
                     f"{returns.mean():.1f}", interval, accuracy])
    document.table(["task", "variant", "seed", "preset", "steps", "hours", "episodes", "return", "interval",
                    "rank accuracy"], rows)


def group(runs, step):
    """{variant: {task: [(seed score, number of episodes), ...]}} at a step."""
    cells = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in sorted(runs, key=lambda run: run.seed):
        if step in report_steps(run):
            cells[run.variant][run.task].append((run.score(step), len(run.scores[step])))
    return cells


def cell(entries):
    """Mean and standard deviation over seeds, and what stands behind them."""
    if not entries:
        return "missing"
    episodes = "/".join(str(n) for n in sorted({number for _, number in entries}))
    return f"{spread([score for score, _ in entries])} ({len(entries)} x {episodes})"


def published(entry):
    return "-" if not entry else f"{entry['mean']:.0f} ± {entry['std']:.0f}"


def order(variants):
    """Base and MOOSS first, the rest by name."""
    return sorted(variants, key=lambda name: (("base", "mooss").index(name) if name in ("base", "mooss") else 2, name))


def dmc_section(document, runs, step, resamples):
    cells = group(runs, step)
    variants = [name for name in order(cells) if name in ("base", "mooss") or not any(
        name in rows for _, rows in ABLATIONS.values())]
    if not variants:
        return
    table = {100_000: PAPER["dmc100k"], 500_000: PAPER["dmc500k"]}.get(step, {})
    hard = PAPER["dmc_hard"].get({100_000: "100k", 500_000: "500k"}.get(step), {})
    columns = list(reversed(table[TASKS[0]])) if table else []  # MOOSS first
    document.heading(f"DeepMind Control, {step:,} environment steps")
    if columns:
        document.text("Columns marked (paper) are the published ones: MOOSS (paper) at 100k is one run a task, its "
                      "spread being over the 10 episodes of that run; Base (paper) is MLR's baseline. Ours: mean ± "
                      "standard deviation over seeds of a seed's mean (seeds x episodes each).")
    present = {task for variant in variants for task in cells[variant]}
    tasks = [task for task in TASKS if table or task in present] + sorted(present - set(TASKS))
    rows = []
    for task in tasks:
        paper = table.get(task) or hard.get(task) or {}
        rows.append([task, *(cell(cells[variant].get(task)) for variant in variants),
                     *(published(paper.get(name)) for name in columns)])
    document.table(["task", *variants, *(f"{name} (paper)" for name in columns)], rows)
    rows = []
    for variant in variants:
        known = {task: [score for score, _ in cells[variant][task]] for task in tasks if cells[variant].get(task)}
        matrix = seed_matrix(known)
        functions = (metrics.aggregate_mean, metrics.aggregate_median, metrics.aggregate_iqm)
        rows.append([variant, *estimates(matrix, functions, resamples, 1), f"{matrix.shape[0]} x {matrix.shape[1]}"])
    document.table(["over tasks", "mean", "median", "IQM", "seeds x tasks"], rows)
    document.text("Intervals: stratified bootstrap over seeds, 95%.")


def atari_section(document, runs, step, resamples):
    cells = group(runs, step)
    if not cells:
        return
    variants = order(cells)
    document.heading(f"Atari, {step:,} interactions")
    document.text("Raw scores; ours: mean ± standard deviation over seeds (seeds x games each). What says (paper) "
                  "is published, at full size after 100,000 interactions.")
    columns = ["MOOSS", "Base", "MLR", "Random", "Human"]
    present = {task for variant in variants for task in cells[variant]}
    games = [game for game in GAMES if step == 100_000 or game in present] + sorted(present - set(GAMES))
    document.table(["game", *variants, *(f"{name} (paper)" for name in columns)], [
        [game, *(cell(cells[variant].get(game)) for variant in variants),
         *(PAPER["atari100k"].get(game, {}).get(name, "-") for name in columns)] for game in games])
    iqm, gap = PAPER["atari100k"]["_iqm"], PAPER["atari100k"]["_optimality_gap"]
    functions, rows, profiles = (metrics.aggregate_iqm, metrics.aggregate_optimality_gap), [], {}
    for name in ("MLR", "Base", "MOOSS"):
        rows.append([f"{name} (paper)", iqm[name], gap[name], "3 x 26"])
        means = np.array([[human_normalised(game, PAPER["atari100k"][game][name]) for game in GAMES]])
        rows.append([f"{name}, from its scores (paper)", *estimates(means, functions, 1, 3), "1 x 26"])
    for variant in variants:
        known = {game: [human_normalised(game, score) for score, _ in cells[variant][game]] for game in games
                 if game in GAMES and cells[variant].get(game)}
        if known:
            matrix = seed_matrix(known)
            rows.append([variant, *estimates(matrix, functions, resamples, 3),
                         f"{matrix.shape[0]} x {matrix.shape[1]}"])
            if matrix.size > 1:
                profiles[variant] = matrix
    document.table(["human-normalised", "IQM", "optimality gap", "seeds x games"], rows)
    document.text("Intervals: stratified bootstrap over seeds, 95% (rliable). An aggregate over fewer than 26 games "
                  "does not compare with the paper's. The published scores, means over seeds, give the published "
                  "aggregates of MLR and MOOSS to 0.005, but not those of Base.")
    if profiles:
        taus = np.linspace(0, 2, 81)
        shares, intervals = library.create_performance_profile(profiles, taus, reps=min(resamples, 2000))
        figure, axes = plt.subplots(figsize=(6, 3.6))
        for variant in profiles:
            line, = axes.plot(taus, shares[variant], label=variant, color=COLOURS.get(variant))
            axes.fill_between(taus, *intervals[variant], alpha=0.2, color=line.get_color())
        axes.set(xlabel="human-normalised score", ylabel="share of runs above", ylim=(0, 1))
        axes.legend()
        document.figure(f"atari_profiles_{step}", figure, "Performance profiles with 95% bands.")


def curves_section(document, runs, resamples):
    """Learning curves over steps and over hours, the authors' behind."""
    by_task = collections.defaultdict(lambda: collections.defaultdict(list))
    for run in runs:
        if len(run.scores) > 1:
            by_task[run.task][run.variant].append(run)
    if not by_task:
        return
    document.heading("Learning curves")
    others = order({variant for variants in by_task.values() for variant in variants} - set(COLOURS))
    colours = {**COLOURS, **{name: PALETTE[number % len(PALETTE)] for number, name in enumerate(others)}}
    for axis in ("steps", "hours"):
        columns = min(3, len(by_task))
        height = -(-len(by_task) // columns)
        figure, grid = plt.subplots(height, columns, figsize=(5 * columns, 3.4 * height), squeeze=False)
        for axes in grid.flat[len(by_task):]:
            axes.axis("off")
        for axes, (task, variants) in zip(grid.flat, sorted(by_task.items())):
            if axis == "steps" and task in AUTHORS:
                axes.plot([p["env_step"] for p in AUTHORS[task]], [p["mean"] for p in AUTHORS[task]], color="#d9a441",
                          linewidth=1, label="authors' MOOSS (one run)")
            for variant in order(variants):
                members = variants[variant]
                steps, mean, low, high = band([{s: run.score(s) for s in run.scores} for run in members], resamples)
                x = steps if axis == "steps" else np.array([np.mean([run.hours[s] for run in members]) for s in steps])
                seeds = "1 seed" if len(members) == 1 else f"{len(members)} seeds"
                axes.plot(x, mean, label=f"{variant} ({seeds})", color=colours[variant])
                axes.fill_between(x, low, high, alpha=0.2, color=colours[variant])
            unit = "interactions" if members[0].atari else "environment steps"
            axes.set(title=task, xlabel=unit if axis == "steps" else "hours", ylabel="return")
            axes.legend(fontsize=7, loc="upper left", framealpha=0.5)
        figure.tight_layout()
        caption = f"Mean evaluation return over {axis}; bands: 95% bootstrap over seeds."
        document.figure(f"curves_{axis}", figure, caption + (
            " The authors' curves are one run a task." if axis == "steps" else ""))


def ablation_sections(document, runs):
    """The paper's ablation tables at 100k steps, its rows beside ours; only where a variant of the table was run."""
    for step in sorted({step for run in runs for step in report_steps(run) if step <= 100_000}):
        cells = group(runs, step)
        for key, (title, variants) in ABLATIONS.items():
            own = [name for name in variants if name not in ("base", "mooss") and cells.get(name)]
            if not own:
                continue
            document.heading(f"Ablation: {title} ({step:,} steps)")
            numbers, rows, means = PAPER.get(key, {}), [], {}
            if numbers:
                document.text("Rows marked paper are the published ones, at full size after 100,000 steps.")
            if "L6_p0" in numbers:
                mean = np.mean([numbers["L6_p0"][task]["mean"] for task in TASKS])
                document.text(f"The printed mean of L = 6, p = 0 is not the mean of its cells, which is {mean:.1f}.")
            if key == "ablation_mask_ratio":
                document.text("The paper's figure does not give its mask ratios; these are ours.")
            for variant, (label, paper_row) in variants.items():
                scores = {task: [s for s, _ in cells.get(variant, {}).get(task, [])] for task in TASKS}
                known = [np.mean(values) for values in scores.values() if values]
                means[label] = np.mean(known) if known else np.nan
                of = f" ({len(known)}/{len(TASKS)} tasks)" if len(known) < len(TASKS) else ""
                tail = [f"{f(known):.1f}{of}" if known else "missing" for f in (np.mean, np.median)]
                rows.append([f"{label}, ours", *(cell(cells.get(variant, {}).get(task)) for task in TASKS), *tail])
                entry = numbers.get(paper_row)
                if entry:
                    tail = [entry.get(f"_{name}", entry.get(name)) for name in ("mean", "median")]
                    rows.append([f"{label}, paper", *(published(entry.get(task)) for task in TASKS), *tail])
            document.table(["variant", *TASKS, "mean", "median"], rows)
            if key in ("ablation_window", "ablation_mask_ratio"):
                figure, axes = plt.subplots(figsize=(5, 3))
                axes.plot(list(means), list(means.values()), marker="o", color=COLOURS["mooss"])
                axes.set(xlabel=title, ylabel="mean over tasks")
                document.figure(key, figure, f"{title}: mean over the tasks that were run.")


def main(argv=None):
    args = tyro.cli(ReportArgs, args=argv)
    runs, skipped = read_runs(args.runs)
    for folder, reason in skipped:
        print(f"skipped {folder}: {reason}", file=sys.stderr)
    if not runs:
        print("error: no finished run in " + ", ".join(args.runs), file=sys.stderr)
        return 2
    document = Document(args.out)
    tasks = {run.task for run in runs}
    document.text(f"Finished runs: {len(runs)}. Tasks: {len(tasks)}. Folders skipped: {len(skipped)}.")
    presets = sorted({run.preset for run in runs}, key=lambda name: (name != "paper", name))
    for preset in presets:  # runs of different sizes share no cell
        if presets != ["paper"]:
            document.heading(f"Preset {preset}")
            settings = "the paper's settings" if preset == "paper" else f"--preset {preset}, not the paper's settings"
            document.text(f"Our runs in this part have {settings}; numbers of paper and authors are their own.")
        document.suffix = f"_{preset}" if len(presets) > 1 else ""
        dmc, atari = ([run for run in runs if run.preset == preset and run.atari == kind] for kind in (False, True))
        ends = collections.Counter(step for run in dmc for step in report_steps(run))
        for step in sorted(ends):
            if step in MARKS or ends[step] > 1:  # a run with an end of its own stands in the list of runs alone
                dmc_section(document, dmc, step, args.bootstrap)
        for step in sorted({step for run in atari for step in report_steps(run)}):
            atari_section(document, atari, step, args.bootstrap)
        ablation_sections(document, dmc)
        curves_section(document, dmc + atari, args.bootstrap)
    runs_section(document, runs)
    if skipped:
        document.heading("Skipped")
        document.table(["folder", "reason"], skipped)
    document.write()
    print(f"wrote {document.out / 'report.html'} and report.md: {len(runs)} runs, {len(skipped)} folders skipped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
