"""What the states know: linear probes of agents that are trained offline on fixed replays.

    # 12 seeds of every arm; about three hours on two cores
    python benchmark/probe.py --task reacher-easy
    # the table and the picture again, from the CSV
    python benchmark/probe.py --task reacher-easy --report-only
    # a try of two minutes
    python benchmark/probe.py --seeds 1 --updates 20 --episodes 6 --out probe_try

Returns are dear and noisy; a ridge regression from the encoder's states to the simulator's own
quantities is neither. A random policy fills two replays and a probe set. Each arm trains the real
agent by the real `update` on a replay, for a seed with the same initial weights and the same
transitions in the same order. Every tenth of the way a ridge is fitted on some episodes of the
probe set and scored on the others.

The endpoint is fixed: held-out R2, mean over the position-like quantities and over the last 40% of
the updates; its paired difference to Base with a 95% interval over 12 seeds.

A run that is in the CSV is not run again, so the command can be stopped and repeated.
"""

import csv
import dataclasses
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from sklearn.linear_model import RidgeCV

import mooss_common as common
import sac_mooss_dmc as dmc

CPU = torch.device("cpu")
PLANNED_SEEDS = 12
POINTS = 10  # probes of a run, beside the one before training
LAST = (7, 8, 9, 10)  # those of the last 40% of the updates: the endpoint
FRAMES = 12  # probed frames of an episode
REPLAYS = 2

# What is read off the simulator. Names of velocities begin with "d_": they are reported, but are
# not part of the endpoint.
QUANTITIES = {
    "reacher-easy": lambda physics: {
        "finger_x": physics.named.data.geom_xpos["finger", "x"],
        "finger_y": physics.named.data.geom_xpos["finger", "y"],
        "target_x": physics.named.data.geom_xpos["target", "x"],
        "target_y": physics.named.data.geom_xpos["target", "y"],
        "d_shoulder": physics.named.data.qvel["shoulder"][0],
        "d_wrist": physics.named.data.qvel["wrist"][0],
    },
    "ball_in_cup-catch": lambda physics: {
        "cup_x": physics.named.data.qpos["cup_x"][0],
        "cup_z": physics.named.data.qpos["cup_z"][0],
        "ball_x": physics.named.data.qpos["ball_x"][0],
        "ball_z": physics.named.data.qpos["ball_z"][0],
        "d_ball_x": physics.named.data.qvel["ball_x"][0],
        "d_ball_z": physics.named.data.qvel["ball_z"][0],
    },
    "cartpole-swingup": lambda physics: {
        "cart_x": physics.cart_position(),
        "pole_cos": physics.pole_angle_cosine(),
        "pole_sin": physics.named.data.xmat["pole_1", "xz"],
        "d_cart": physics.named.data.qvel["slider"][0],
        "d_pole": physics.named.data.qvel["hinge_1"][0],
    },
}

# The arms, as flags of the script. One run of Base serves two arms: at as many updates as MOOSS
# makes ("base"), and at as many as MOOSS has time for ("base_same_time").
ARMS = {
    "base": dict(aux_weight=0.0),
    "mooss": dict(),
    "second_step": dict(temporal_window=0, mask_ratio=0.0),
    "cube_masks": dict(mask_type="cube"),
}
LABELS = {
    "untrained": "untrained encoder",
    "base": "Base",
    "base_same_time": "Base, as long as MOOSS takes",
    "second_step": "MOOSS with L = 0 and no mask",
    "cube_masks": "MOOSS with cube masks",
    "mooss": "MOOSS",
}
COLOURS = {  # Base and MOOSS as in the report
    "base": "tab:gray",
    "base_same_time": "black",
    "second_step": "tab:green",
    "cube_masks": "tab:orange",
    "mooss": "tab:blue",
}


@dataclasses.dataclass
class ProbeArgs:
    """Probe what the states of offline-trained agents know."""

    # task of the suite
    task: Literal["reacher-easy", "ball_in_cup-catch", "cartpole-swingup"] = "reacher-easy"
    seeds: int = PLANNED_SEEDS  # paired seeds, 1 and on
    updates: int = 1000  # updates of a MOOSS run
    # updates that Base makes in the time of one of MOOSS, measured beforehand
    time_factor: float = 2.1
    episodes: int = 150  # episodes of the probe set; two thirds to fit, one third to score
    replay_episodes: int = 40  # episodes in each of the two replays
    batch_size: int = 96  # transitions an update
    aux_batch_size: int = 8  # sequences an update
    num_filters: int = 24  # filters of each conv layer
    workers: int = 2  # runs at a time, a core and a thread each
    out: str = "benchmark/results/probe"  # CSV, table and picture
    cache: str = "runs_probe"  # where the collected frames are kept
    report_only: bool = False  # make table and picture from the CSV and train nothing


def script_args(probe, arm, seed):
    return dmc.resolve_args(dmc.Args(
        env_id=probe.task, preset="laptop", seed=seed, device="cpu", batch_size=probe.batch_size,
        aux_batch_size=probe.aux_batch_size, num_filters=probe.num_filters, **ARMS[arm]))


# -------------------------------------------------------------------------------------------- data
def collect(probe, name, episodes):
    """Episodes of a random policy, made once and then read from the cache.

    frames (E, T + 1, C, H, W), actions (E, T, A), rewards (E, T), quantities (E, T + 1, Q) and
    their names.
    """
    path = Path(probe.cache) / f"{probe.task}__{name}__{episodes}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new.npz")
        np.savez(beside, **play(probe, name, episodes))
        os.replace(beside, path)
    return np.load(path)


def play(probe, name, episodes):
    env = dmc.make_env(script_args(probe, "base", 1), CPU)
    read = QUANTITIES[probe.task]
    rng = np.random.default_rng(common.derive_seed("probe", probe.task, name))
    data = {"frames": [], "actions": [], "rewards": [], "quantities": []}
    for episode in range(episodes):
        obs, _ = env.reset(seed=common.derive_seed("probe", name, episode))
        quantities = [read(env.unwrapped.physics)]
        frames = [obs[-1]]
        actions = []
        rewards = []
        done = False
        while not done:
            action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            frames.append(obs[-1])
            quantities.append(read(env.unwrapped.physics))
            actions.append(action)
            rewards.append(float(reward))
        data["frames"].append(np.array(frames))
        data["actions"].append(np.array(actions))
        data["rewards"].append(np.array(rewards))
        data["quantities"].append(np.array([list(values.values()) for values in quantities]))
    env.close()
    return {"names": list(quantities[0]), **{name: np.array(x) for name, x in data.items()}}


class PairedReplay(dmc.SequenceReplay):
    """Draws transitions and sequences from random streams of their own.

    What else an arm draws from torch's generator then changes nothing: in all arms of a seed, the
    transitions of an update are the same ones.
    """

    def seed_streams(self, seed):
        """One stream for transitions, one for sequences."""
        self.streams = {}
        for kind in ("transitions", "sequences"):
            generator = torch.Generator().manual_seed(common.derive_seed(seed, "replay", kind))
            self.streams[kind] = generator.get_state()

    def sample(self, count, length=1):
        kind = "transitions" if length == 1 else "sequences"
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.streams[kind])
            rows = super().sample(count, length)
            self.streams[kind] = torch.get_rng_state()
        return rows


def fill_replay(args, data, seed):
    # The arrays of a file are read anew at each access.
    frames = data["frames"]
    actions = data["actions"]
    rewards = data["rewards"]
    episodes, steps, action_dim = actions.shape
    replay = PairedReplay(
        episodes * (steps + 1), frames.shape[2:], action_dim, args.frame_stack, CPU)
    replay.seed_streams(seed)
    for episode in range(episodes):
        replay.begin_episode(frames[episode, 0])
        for step in range(steps):
            replay.add(
                actions[episode, step], rewards[episode, step], False, frames[episode, step + 1])
    return replay


@dataclasses.dataclass
class ProbeSet:
    """Observations whose simulator quantities are known."""

    stacks: torch.Tensor  # (N, frame_stack * C, H, W), centre crops in bytes
    quantities: np.ndarray  # (N, Q)
    names: list  # (Q,)
    fits: np.ndarray  # (N,): whether it serves to fit; otherwise to score

    @classmethod
    def of(cls, args, data):
        """The same moments of every episode; no episode serves both to fit and to score."""
        frames = data["frames"]
        episodes, length = frames.shape[:2]
        times = np.linspace(args.frame_stack, length - 1, FRAMES).astype(int)
        ages = np.arange(args.frame_stack - 1, -1, -1)  # oldest frame first
        stacks = torch.from_numpy(frames[:, times[:, None] - ages])  # (E, FRAMES, stack, C, H, W)
        stacks = dmc.centre_crop(stacks.flatten(0, 1).flatten(1, 2), args.image_size)
        quantities = data["quantities"][:, times].reshape(len(stacks), -1)
        names = [str(name) for name in data["names"]]
        fits = np.repeat(np.arange(episodes) < 2 * episodes // 3, FRAMES)
        return cls(stacks, quantities, names, fits)

    def r2(self, inputs):
        """What a ridge reads from inputs (N, d), as columns of the CSV."""
        values = held_out_r2(inputs, self.quantities, self.fits)
        positions = [x for name, x in zip(self.names, values) if not name.startswith("d_")]
        columns = {f"r2_{name}": x for name, x in zip(self.names, values)}
        return {"r2_position": np.mean(positions), **columns}


# --------------------------------------------------------------------------------------- one probe
def held_out_r2(inputs, targets, fits):
    """R2 (Q,) on the held-out rows, of a ridge whose strength is chosen on the others."""
    inputs = (inputs - inputs[fits].mean(0)) / (inputs[fits].std(0) + 1e-6)
    ridge = RidgeCV(np.logspace(-2, 5, 8)).fit(inputs[fits], targets[fits])
    held_out = targets[~fits]
    error = ((held_out - ridge.predict(inputs[~fits])) ** 2).sum(0)
    return 1 - error / ((held_out - held_out.mean(0)) ** 2).sum(0)


@torch.no_grad()
def encode(agent, stacks):
    """States (N, d), and the share of conv features that are zero in all of them."""
    encoder = agent.critic.encoder
    states = []
    alive = torch.zeros(encoder.feature_count, dtype=torch.bool)
    for part in stacks.split(256):
        features = encoder.convs(dmc.scale(part, 1 / agent.args.pixel_scale))
        states.append(encoder.projection(features))
        alive |= (features > 0).any(0)
    return torch.cat(states).numpy(), 1 - alive.float().mean().item()


def effective_rank(states):
    """exp of the entropy of the normalised singular values of the centred states."""
    values = np.linalg.svd(states - states.mean(0), compute_uv=False)
    shares = values / max(values.sum(), 1e-12) + 1e-12
    return np.exp(-(shares * np.log(shares)).sum())


def rounded(row):
    numbers = (float, np.floating)
    return {name: f"{x:.5g}" if isinstance(x, numbers) else x for name, x in row.items()}


def probe_points(probe, arm):
    """What a run probes and when: arm, number of the point and update, in the order of updates."""
    updates = [probe.updates * point // POINTS for point in range(POINTS + 1)]
    stops = [(arm, point, update) for point, update in enumerate(updates)]
    if arm == "base":
        stops += [("base_same_time", point, round(probe.time_factor * update))
                  for point, update in enumerate(updates)]
    return sorted(stops, key=lambda stop: stop[2])


def run_arm(probe, arm, seed):
    """Train one agent and probe it on the way: rows of the CSV."""
    torch.set_num_threads(1)
    args = script_args(probe, arm, seed)
    probe_set = ProbeSet.of(args, collect(probe, "probe", probe.episodes))
    data = collect(probe, f"replay{seed % REPLAYS}", probe.replay_episodes)
    replay = fill_replay(args, data, seed)
    torch.manual_seed(seed)
    obs_shape = (args.frame_stack, *replay.frames.shape[1:])
    agent = dmc.Agent(args, obs_shape, replay.actions.shape[1], CPU)

    rows = []
    update = 0
    seconds = 0.0
    for name, point, until in probe_points(probe, arm):
        began = time.perf_counter()
        while update < until:
            agent.update(replay, update, log=update == until - 1)
            update += 1
        seconds += time.perf_counter() - began
        states, dead_features = encode(agent, probe_set.stacks)
        rank_accuracy = agent.metrics.get("mooss/rank_accuracy", np.nan)
        rows.append(rounded({
            "arm": name,
            "seed": seed,
            "point": point,
            "update": update,
            "seconds": round(seconds, 1),
            **probe_set.r2(states),
            "state_std": states.std(0).mean(),
            "effective_rank": effective_rank(states),
            "dead_features": dead_features,
            "rank_accuracy": float(rank_accuracy),
        }))
    return rows


def run_one(run):
    return run_arm(*run)


def pixel_ceiling(probe):
    """What a ridge reads from the observations themselves, at a third of their side: one row."""
    args = script_args(probe, "base", 1)
    probe_set = ProbeSet.of(args, collect(probe, "probe", probe.episodes))
    small = F.avg_pool2d(probe_set.stacks.float(), 3).flatten(1).numpy()
    return rounded({"arm": "pixels", "seed": 0, "point": 0, "update": 0, **probe_set.r2(small)})


# ------------------------------------------------------------------------------------------ report
def read_rows(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with open(beside, "w", newline="") as file:
        columns = list(max(rows, key=len))  # the row of the pixels lacks some
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(
            sorted(rows, key=lambda row: (row["arm"], int(row["seed"]), int(row["point"]))))
    os.replace(beside, path)


def by_seed(rows, arm, column, points=LAST):
    """The mean of a column over the points that count, for each seed of an arm."""
    if arm == "untrained":  # all arms of a seed begin as Base does
        arm = "base"
        points = (0,)
    values = {}
    for row in rows:
        if row["arm"] == arm and int(row["point"]) in points:
            values.setdefault(int(row["seed"]), []).append(float(row[column]))
    return {seed: float(np.mean(found)) for seed, found in values.items()}


def mean_over_seeds(rows, arm, column, points=LAST):
    return float(np.mean(list(by_seed(rows, arm, column, points).values())))


def interval(values):
    """Half the width of the 95% t interval of a mean; none for fewer than three values."""
    if len(values) < 3:
        return None
    return float(scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values))


def difference_to_base(rows, arm, column):
    """The mean difference over the seeds that both have, and its interval, in words."""
    base = by_seed(rows, "base", column)
    values = by_seed(rows, arm, column)
    differences = [values[seed] - base[seed] for seed in values if seed in base]
    if arm == "base" or not differences:
        return "-"
    mean = np.mean(differences)
    half = interval(differences)
    if half is None:
        return f"{mean:+.3f}"
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def markdown_table(rows):
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return [header, "|---" * len(rows[0]) + "|", *body, ""]


def table_of_arms(rows, arms):
    table = [["arm", "seeds", "R2 of positions", "difference to Base, paired [95%]",
              "deviation of states", "effective rank", "dead features", "rank accuracy"]]
    for arm in arms:
        can_rank = arm in ("mooss", "cube_masks")  # others have no W, or no window
        table.append([
            LABELS[arm],
            str(len(by_seed(rows, arm, "r2_position"))),
            f"{mean_over_seeds(rows, arm, 'r2_position'):.3f}",
            difference_to_base(rows, arm, "r2_position"),
            f"{mean_over_seeds(rows, arm, 'state_std'):.2f}",
            f"{mean_over_seeds(rows, arm, 'effective_rank'):.1f}",
            f"{mean_over_seeds(rows, arm, 'dead_features'):.2f}",
            f"{mean_over_seeds(rows, arm, 'rank_accuracy'):.2f}" if can_rank else "-",
        ])
    return table


def table_of_quantities(rows, arms, columns, pixels):
    table = [["R2 of", *[LABELS[arm] for arm in arms], "ridge on downsampled pixels",
              "MOOSS minus Base, paired [95%]"]]
    for column in columns:
        name = column.removeprefix("r2_")
        table.append([
            f"velocity {name}" if name.startswith("d_") else name,
            *[f"{mean_over_seeds(rows, arm, column):.2f}" for arm in arms],
            f"{float(pixels[column]):.2f}" if pixels else "-",
            difference_to_base(rows, "mooss", column),
        ])
    return table


def report(probe, rows):
    """Table and picture of a task, from nothing but the rows of its CSV."""
    out = Path(probe.out)
    arms = [arm for arm in LABELS if by_seed(rows, arm, "r2_position")]
    common.require(arms, f"{out} holds no run of {probe.task} yet")
    pixels = next((row for row in rows if row["arm"] == "pixels"), None)
    quantities = [
        name for name in rows[0] if name.startswith("r2_") and name != "r2_position"]
    velocities = [name for name in quantities if name.startswith("r2_d_")]

    lines = [
        f"# {probe.task}: what a linear probe reads from the states", "",
        "Held-out R2, mean over the last 40% of the updates; of the untrained encoder, before the "
        "first. Positions are all quantities but the velocities.", ""]
    seeds = {arm: len(by_seed(rows, arm, "r2_position")) for arm in arms}
    if min(seeds.values()) < PLANNED_SEEDS:
        found = "; ".join(f"{LABELS[arm]} {count}" for arm, count in seeds.items())
        lines += [f"**Incomplete**: of the {PLANNED_SEEDS} planned seeds there are: {found}.", ""]
    lines += markdown_table(table_of_arms(rows, arms))
    lines += markdown_table(table_of_quantities(rows, arms, quantities, pixels))
    if pixels:
        ceiling = float(pixels["r2_position"])
        lines.append(f"A ridge on downsampled pixels reads positions with R2 {ceiling:.3f}.")
    for column in velocities:
        values = {arm: mean_over_seeds(rows, arm, column) for arm in arms}
        best = max(values, key=values.get)
        ceiling = f"; on downsampled pixels it is {float(pixels[column]):.2f}" if pixels else ""
        lines.append(f"The velocity {column.removeprefix('r2_')} is read with R2 "
                     f"{values[best]:.2f} at best ({LABELS[best]}){ceiling}.")
    (out / f"{probe.task}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    draw_curves(probe.task, rows, pixels, out / f"{probe.task}.png")


def draw_curves(task, rows, pixels, path):
    """R2 of positions over updates: one line an arm, bands of 95% intervals over seeds."""
    points = range(POINTS + 1)
    arms = [arm for arm in COLOURS if by_seed(rows, arm, "r2_position")]
    # Base with more updates is drawn where MOOSS is at the same time.
    on_axis = next(arm for arm in arms if arm != "base_same_time")
    updates = np.array([mean_over_seeds(rows, on_axis, "update", (point,)) for point in points])
    figure, axes = plt.subplots(figsize=(7, 4.6), layout="constrained")
    axes.axvspan(updates[LAST[0] - 1], updates[-1], color="0.93", zorder=0)
    for arm in arms:
        curves = [list(by_seed(rows, arm, "r2_position", (point,)).values()) for point in points]
        means = np.array([np.mean(values) for values in curves])
        label = LABELS[arm]
        if arm == "base_same_time":
            factor = mean_over_seeds(rows, arm, "update", (POINTS,)) / updates[-1]
            label += f" ({factor:.1f} x updates)"
        axes.plot(updates, means, color=COLOURS[arm], label=label, linewidth=2)
        halves = [interval(values) for values in curves]
        if None not in halves:
            axes.fill_between(
                updates, means - halves, means + halves, color=COLOURS[arm], alpha=0.15,
                linewidth=0)
    if pixels:
        axes.axhline(
            float(pixels["r2_position"]), color="0.4", linestyle="--",
            label="ridge on downsampled pixels")
    axes.set_title(f"{task}: what a linear probe reads from the states", fontsize=13)
    axes.set_xlabel("updates (grey: the endpoint; bands: 95% intervals)", fontsize=12)
    axes.set_ylabel("held-out R2 of positions", fontsize=12)
    axes.set_xlim(updates[0], updates[-1])
    axes.tick_params(labelsize=11)
    # Below the axes, where it hides no curve.
    figure.legend(loc="outside lower center", ncols=2, fontsize=10, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


# -------------------------------------------------------------------------------------------- main
def train_arms(probe, path, rows):
    """Make all runs that are not among the rows yet, and add theirs; the file is always whole."""
    sets = {"probe": probe.episodes}
    sets |= {f"replay{index}": probe.replay_episodes for index in range(REPLAYS)}
    for name, episodes in sets.items():
        print(f"collecting {name}: {episodes} episodes", flush=True)
        collect(probe, name, episodes)
    if not any(row["arm"] == "pixels" for row in rows):
        rows.append(pixel_ceiling(probe))
        write_rows(path, rows)
    done = {(row["arm"], int(row["seed"])) for row in rows}
    runs = [(probe, arm, seed) for seed in range(1, probe.seeds + 1) for arm in ARMS
            if (arm, seed) not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(probe.workers, maxtasksperchild=1) as pool:
        for finished in pool.imap_unordered(run_one, runs):
            rows += finished
            write_rows(path, rows)
            last = finished[-1]
            print(f"{finished[0]['arm']}, seed {last['seed']}: R2 {last['r2_position']} after "
                  f"{last['seconds']} s of updates", flush=True)


def main(argv=None):
    probe = tyro.cli(ProbeArgs, args=argv)
    path = Path(probe.out) / f"{probe.task}.csv"
    rows = read_rows(path)
    if not probe.report_only:
        train_arms(probe, path, rows)
    common.require(rows, f"{path} holds no run yet")
    report(probe, rows)
    return 0


if __name__ == "__main__":
    common.exit_with(main)
