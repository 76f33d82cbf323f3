"""What the states know: linear probes of agents that are trained offline on fixed replays.

    python benchmark/probe.py --task reacher-easy               # 12 seeds of every arm; about three hours on two cores
    python benchmark/probe.py --task reacher-easy --report-only # the table and the picture again, from the CSV
    python benchmark/probe.py --task reacher-easy --seeds 1 --updates 20 --episodes 6 --out probe_try    # two minutes

Returns are dear and noisy; a ridge regression from the encoder's states to the simulator's own quantities is neither.
A random policy fills two replays and a probe set. Each arm trains the real agent by the real `update` on a replay, with
the same initial weights and the same order of transitions for a seed; every tenth of the way a ridge is fitted on some
episodes of the probe set and scored on the others. The endpoint is fixed: held-out R2, mean over the position-like
quantities and over the last 40% of the updates; its paired difference to Base with a 95% interval over the seeds.
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
import tyro
from sklearn.linear_model import RidgeCV

import mooss_common as common
import sac_mooss_dmc as dmc

POINTS = 10  # probes of a run, beside the one before training
LAST = (7, 8, 9, 10)  # those of the last 40% of the updates: the endpoint
FRAMES = 12  # probed frames of an episode
REPLAYS = 2

# What is read off the simulator. The names of velocities begin with "d_": they are reported, not in the endpoint.
QUANTITIES = {
    "reacher-easy": lambda physics: {
        "finger_x": physics.named.data.geom_xpos["finger", "x"],
        "finger_y": physics.named.data.geom_xpos["finger", "y"],
        "target_x": physics.named.data.geom_xpos["target", "x"],
        "target_y": physics.named.data.geom_xpos["target", "y"],
        "d_shoulder": physics.named.data.qvel["shoulder"][0],
        "d_wrist": physics.named.data.qvel["wrist"][0]},
    "ball_in_cup-catch": lambda physics: {
        "cup_x": physics.named.data.qpos["cup_x"][0],
        "cup_z": physics.named.data.qpos["cup_z"][0],
        "ball_x": physics.named.data.qpos["ball_x"][0],
        "ball_z": physics.named.data.qpos["ball_z"][0],
        "d_ball_x": physics.named.data.qvel["ball_x"][0],
        "d_ball_z": physics.named.data.qvel["ball_z"][0]},
    "cartpole-swingup": lambda physics: {
        "cart_x": physics.cart_position(),
        "pole_cos": physics.pole_angle_cosine(),
        "pole_sin": physics.named.data.xmat["pole_1", "xz"],
        "d_cart": physics.named.data.qvel["slider"][0],
        "d_pole": physics.named.data.qvel["hinge_1"][0]},
}

# The arms, as flags of the script. One run of Base serves two arms: at as many updates as MOOSS makes ("base"), and at as
# many as MOOSS has time for ("base_same_time").
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
COLOURS = {"base": "tab:blue", "base_same_time": "tab:cyan", "second_step": "tab:green", "cube_masks": "tab:purple",
           "mooss": "tab:orange"}


@dataclasses.dataclass
class ProbeArgs:
    """Probe what the states of offline-trained agents know."""

    task: Literal["reacher-easy", "ball_in_cup-catch", "cartpole-swingup"] = "reacher-easy"  # task of the suite
    seeds: int = 12  # paired seeds, 1 and on
    updates: int = 1500  # updates of a MOOSS run
    time_factor: float = 1.75  # updates that Base makes in the time of one of MOOSS, measured beforehand
    episodes: int = 150  # episodes of the probe set; two thirds to fit, one third to score
    replay_episodes: int = 40  # episodes in each of the two replays
    batch_size: int = 128  # transitions an update
    aux_batch_size: int = 8  # sequences an update
    num_filters: int = 32  # filters of each conv layer
    workers: int = 2  # runs at a time, a core and a thread each
    out: str = "benchmark/results/probe"  # CSV, table and picture
    cache: str = "runs_probe"  # where the collected frames are kept
    report_only: bool = False  # make table and picture from the CSV and train nothing


def script_args(probe, arm, seed):
    return dmc.resolve_args(dmc.Args(
        env_id=probe.task, preset="laptop", seed=seed, device="cpu", batch_size=probe.batch_size,
        aux_batch_size=probe.aux_batch_size, num_filters=probe.num_filters, **ARMS[arm]))


# ---------------------------------------------------------------------------------------------- data
def collect(probe, name, episodes):
    """Episodes of a random policy: frames (E, T + 1, C, H, W), actions, rewards (E, T, ...), quantities (E, T + 1, Q)."""
    path = Path(probe.cache) / f"{probe.task}__{name}__{episodes}.npz"
    if path.exists():
        return np.load(path)
    args = script_args(probe, "base", 1)
    env = dmc.make_env(args, torch.device("cpu"))
    read = QUANTITIES[probe.task]
    rng = np.random.default_rng(common.derive_seed("probe", probe.task, name))
    columns = {"frames": [], "actions": [], "rewards": [], "quantities": []}
    for episode in range(episodes):
        obs, _ = env.reset(seed=common.derive_seed("probe", name, episode))
        physics = env.unwrapped.physics
        names = [*read(physics)]
        frames, quantities, actions, rewards = [obs[-1]], [[*read(physics).values()]], [], []
        done = False
        while not done:
            action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            obs, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            frames.append(obs[-1])
            quantities.append([*read(physics).values()])
            actions.append(action)
            rewards.append(float(reward))
        for column, values in zip(columns, (frames, actions, rewards, quantities)):
            columns[column].append(np.array(values))
    env.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new.npz")
    np.savez(beside, names=names, **{name: np.array(values) for name, values in columns.items()})
    os.replace(beside, path)
    return np.load(path)


class PairedReplay(dmc.SequenceReplay):
    """Transitions and sequences are drawn from streams of their own: every arm sees the same transitions in order."""

    def __init__(self, *args):
        super().__init__(*args)
        self.streams = [np.random.default_rng([self.rng.integers(2**32), stream]) for stream in range(2)]

    def sample_rows(self, count, length=1):
        self.rng = self.streams[length > 1]
        return super().sample_rows(count, length)


def fill_replay(args, data, seed):
    episodes, steps, action_dim = data["actions"].shape
    frame_shape = data["frames"].shape[2:]
    replay = PairedReplay(episodes * (steps + 1), frame_shape, action_dim, args.frame_stack,
                          common.derive_seed(seed, "replay"), torch.device("cpu"))
    for frames, actions, rewards in zip(data["frames"], data["actions"], data["rewards"]):
        replay.add(frames[0])
        for frame, action, reward in zip(frames[1:], actions, rewards):
            replay.add(frame, action, reward, False)
    return replay


def probe_set(args, data):
    """Centre-cropped stacks (N, C, H, W), their quantities (N, Q), and which of them serve to fit."""
    frames, quantities = data["frames"], data["quantities"]
    times = np.linspace(args.frame_stack, frames.shape[1] - 1, FRAMES).astype(int)
    margin = (args.render_size - args.image_size) // 2
    inside = slice(margin, margin + args.image_size)
    back = range(args.frame_stack - 1, -1, -1)
    stacks = np.stack([frames[:, times - age] for age in back], axis=2)  # (E, FRAMES, stack, C, H, W)
    stacks = stacks[..., inside, inside].reshape(-1, args.frame_stack * 3, args.image_size, args.image_size)
    fits = np.repeat(np.arange(len(frames)) < 2 * len(frames) // 3, FRAMES)
    return stacks, quantities[:, times].reshape(len(stacks), -1), fits


# ---------------------------------------------------------------------------------------------- one probe
def held_out_r2(inputs, targets, fits):
    """R2 of each target on the held-out rows, by a ridge whose strength is chosen on the others. (Q,)"""
    mean, deviation = inputs[fits].mean(0), inputs[fits].std(0) + 1e-6
    inputs = (inputs - mean) / deviation
    predicted = RidgeCV(np.logspace(-2, 5, 8)).fit(inputs[fits], targets[fits]).predict(inputs[~fits])
    error = ((targets[~fits] - predicted) ** 2).sum(0)
    return 1 - error / ((targets[~fits] - targets[~fits].mean(0)) ** 2).sum(0)


@torch.no_grad()
def encode(agent, stacks):
    """States (N, d), and whether each conv feature was ever above zero."""
    states, alive = [], False
    for part in torch.from_numpy(stacks).split(256):
        features = agent.critic.encoder.convs(part.float() / agent.args.pixel_scale)
        states.append(agent.critic.encoder.projection(features))
        alive = alive | (features > 0).any(0)
    return torch.cat(states).numpy(), alive


def effective_rank(states):
    """exp of the entropy of the normalised singular values of the centred states."""
    values = np.linalg.svd(states - states.mean(0), compute_uv=False)
    shares = values / values.sum() + 1e-12
    return float(np.exp(-(shares * np.log(shares)).sum()))


def run_arm(probe, arm, seed):
    """Train one agent and probe it on the way: a list of rows."""
    torch.set_num_threads(1)
    args = script_args(probe, arm, seed)
    data = collect(probe, "probe", probe.episodes)
    names = [str(name) for name in data["names"]]
    positions = [index for index, name in enumerate(names) if not name.startswith("d_")]
    stacks, quantities, fits = probe_set(args, data)
    replay = fill_replay(args, collect(probe, f"replay{seed % REPLAYS}", probe.replay_episodes), seed)
    torch.manual_seed(seed)
    agent = dmc.Agent(args, (args.frame_stack, *data["frames"].shape[2:]), replay.actions.shape[1],
                      torch.device("cpu"))
    tenths = [probe.updates * point // POINTS for point in range(POINTS + 1)]
    stops = [(arm, point, update) for point, update in enumerate(tenths)]
    if arm == "base":
        longer = [("base_same_time", point, round(probe.time_factor * update)) for point, update in enumerate(tenths)]
        stops = sorted(stops + longer, key=lambda stop: stop[2])

    rows, update, seconds = [], 0, 0.0
    for name, point, until in stops:
        began = time.perf_counter()
        while update < until:
            agent.update(replay, update, log=update == until - 1)
            update += 1
        seconds += time.perf_counter() - began
        states, alive = encode(agent, stacks)
        r2 = held_out_r2(states, quantities, fits)
        rows.append({
            "arm": name, "seed": seed, "point": point, "update": update, "seconds": round(seconds, 1),
            "r2_position": r2[positions].mean(), **dict(zip((f"r2_{name}" for name in names), r2)),
            "state_std": states.std(0).mean(), "effective_rank": effective_rank(states),
            "dead_features": 1 - alive.float().mean().item(),
            "rank_accuracy": float(agent.metrics.get("mooss/rank_accuracy", np.nan))})
    return [{key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()}
            for row in rows]


def pixel_ceiling(probe):
    """What a ridge reads from the observations themselves, downsampled three times: a row as those of the arms."""
    args = script_args(probe, "base", 1)
    data = collect(probe, "probe", probe.episodes)
    names = [str(name) for name in data["names"]]
    stacks, quantities, fits = probe_set(args, data)
    small = torch.nn.functional.avg_pool2d(torch.from_numpy(stacks).float(), 3).flatten(1).numpy()
    r2 = held_out_r2(small, quantities, fits)
    positions = [index for index, name in enumerate(names) if not name.startswith("d_")]
    return {"arm": "pixels", "seed": 0, "point": 0, "update": 0, "r2_position": f"{r2[positions].mean():.5g}",
            **{f"r2_{name}": f"{value:.5g}" for name, value in zip(names, r2)}}


# ---------------------------------------------------------------------------------------------- report
def read_rows(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path, rows):
    columns = [*max(rows, key=len)]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with open(beside, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["arm"], int(row["seed"]), int(row["point"]))))
    os.replace(beside, path)


def endpoints(rows, arm, column="r2_position", points=LAST):
    """The mean over the points that count, for each seed."""
    by_seed = {}
    for row in rows:
        if row["arm"] == arm and int(row["point"]) in points:
            by_seed.setdefault(int(row["seed"]), []).append(float(row[column]))
    return {seed: float(np.mean(values)) for seed, values in by_seed.items()}


def interval(values):
    """Half the width of the 95% t interval of a mean; none for fewer than three values."""
    if len(values) < 3:
        return None
    return float(scipy.stats.t.ppf(0.975, len(values) - 1) * scipy.stats.sem(values))


def report(probe, rows):
    out = Path(probe.out)
    untrained = [dict(row, arm="untrained", point=LAST[0]) for row in rows
                 if row["arm"] == "base" and int(row["point"]) == 0]
    quantities = [column for column in rows[0] if column.startswith("r2_") and column != "r2_position"]
    base = endpoints(rows, "base")
    lines = [f"# {probe.task}: held-out R2 of a linear probe, mean over the last 40% of the updates", "",
             "| arm | seeds | R2 of positions | difference to Base, paired | "
             + " | ".join(column.removeprefix("r2_") for column in quantities) + " | state std | effective rank |",
             "|---|---|---|---|" + "---|" * (len(quantities) + 2)]
    for arm, label in LABELS.items():
        values = endpoints(rows + untrained, arm)
        if not values:
            continue
        differences = [values[seed] - base[seed] for seed in values if seed in base]
        half = interval(differences)
        mean = np.mean(differences)
        difference = "-" if arm == "base" else f"{mean:+.3f}" + (
            f" [{mean - half:+.3f}, {mean + half:+.3f}]" if half is not None else "")
        others = [np.mean([*endpoints(rows + untrained, arm, column).values()])
                  for column in (*quantities, "state_std", "effective_rank")]
        lines.append(f"| {label} | {len(values)} | {np.mean([*values.values()]):.3f} | {difference} | "
                     + " | ".join(f"{value:.2f}" for value in others) + " |")
    for row in rows:
        if row["arm"] == "pixels":
            lines.append(f"| ridge on downsampled pixels | - | {float(row['r2_position']):.3f} | - | "
                         + " | ".join(f"{float(row[column]):.2f}" for column in quantities) + " | - | - |")
    (out / f"{probe.task}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for arm, colour in COLOURS.items():
        curves = np.array([[*endpoints(rows, arm, points=(point,)).values()] for point in range(POINTS + 1)])
        if curves.size == 0:
            continue
        updates = np.linspace(0, probe.updates, POINTS + 1)
        axes.plot(updates, curves.mean(1), color=colour, label=LABELS[arm], linewidth=2)
        halves = [interval(values) for values in curves]
        if halves[0] is not None:
            axes.fill_between(updates, curves.mean(1) - halves, curves.mean(1) + halves, color=colour, alpha=0.15)
    axes.axvspan(0.65 * probe.updates, probe.updates, color="0.93", zorder=0)
    axes.set(xlabel="updates (Base, as long as MOOSS takes: updates of MOOSS in the same time)",
             ylabel="held-out R2 of positions", title=f"{probe.task}: what a linear probe reads from the states")
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(out / f"{probe.task}.png", dpi=130)
    plt.close(figure)


def main(argv=None):
    probe = tyro.cli(ProbeArgs, args=argv)
    path = Path(probe.out) / f"{probe.task}.csv"
    rows = read_rows(path)
    if not probe.report_only:
        for name, episodes in (("probe", probe.episodes), *((f"replay{index}", probe.replay_episodes)
                                                            for index in range(REPLAYS))):
            print(f"collecting {name}: {episodes} episodes", flush=True)
            collect(probe, name, episodes)
        if not any(row["arm"] == "pixels" for row in rows):
            rows.append(pixel_ceiling(probe))
            write_rows(path, rows)
        done = {(row["arm"], int(row["seed"])) for row in rows}
        runs = [(probe, arm, seed) for seed in range(1, probe.seeds + 1) for arm in ARMS if (arm, seed) not in done]
        with multiprocessing.get_context("spawn").Pool(probe.workers, maxtasksperchild=1) as pool:
            for finished in pool.imap_unordered(run_one, runs):
                rows += finished
                write_rows(path, rows)
                print(f"{finished[0]['arm']}, seed {finished[0]['seed']}: R2 {finished[-1]['r2_position']} after "
                      f"{finished[-1]['seconds']} s of updates", flush=True)
    common.require(rows, f"{path} holds no run yet")
    report(probe, rows)
    return 0


def run_one(run):
    return run_arm(*run)


if __name__ == "__main__":
    common.exit_with(main)
