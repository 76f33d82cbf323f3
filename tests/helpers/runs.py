"""What a run leaves in its folder: read it, compare it with another run's, damage it."""

import csv
import os

import gymnasium as gym
import torch


def rows(path):
    """The rows of a CSV without the column that tells the time."""
    with open(path, newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        row.pop("hours", None)
    return found


def table(path):
    """The header and rows of a CSV, field by field as they were written, without `hours`."""
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    if not lines:
        return lines
    hours = lines[0].index("hours")
    return [line[:hours] + line[hours + 1:] for line in lines]


def scalars(path):
    """What TensorBoard shows of a run folder: name -> list of (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def load(path):
    """The contents of a checkpoint file."""
    return torch.load(path, weights_only=True)


def saved_run(path):
    """Everything a run has saved, its replay put together; without paths and times."""
    state = load(path / "checkpoint.pt")
    pieces = [load(path / "replay" / "{:09d}-{:09d}.pt".format(*piece))
              for piece in state.pop("pieces")]
    if pieces:
        # Of older rows, which are overwritten in the replay, some may still be in the files. One
        # place of the replay is the newest row's, which the checkpoint itself holds.
        kept = state["args"]["buffer_size"] - 1
        state["rows"] = {
            name: torch.cat([piece[name] for piece in pieces])[-kept:] for name in pieces[0]
        }
    for name in ("run_root", "resume", "total_timesteps"):
        del state["args"][name]
    state["episodic_return"] = state.pop("logs")["episodic_return"]
    return state


def assert_equal(a, b, path=""):
    """Nested dictionaries and lists with tensors, to the last bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for number, (x, y) in enumerate(zip(a, b)):
            assert_equal(x, y, f"{path}/{number}")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(a, b):
    """Two run folders hold the same logs (but for the time) and the same checkpoint."""
    for name in ("train.csv", "eval.csv"):
        assert table(a / name) == table(b / name)
    assert_equal(saved_run(a), saved_run(b))


def damage(path, kind):
    """Spoil a file: truncated, empty, flipped (a bit), foreign (a file of torch) or text."""
    if kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
        return
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        data = data[:len(data) // 2]
    elif kind == "empty":
        data = b""
    elif kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "text":
        data = b"hello"
    else:
        raise ValueError(kind)
    path.write_bytes(bytes(data))


class StepHook(gym.Wrapper):
    """Calls a function before every step."""

    def __init__(self, env, hook):
        super().__init__(env)
        self.hook = hook

    def step(self, action):
        self.hook()
        return super().step(action)


class Steps:
    """Counts the steps of a run's environments, and does something before a chosen one.

    `watch` puts it in the place of a script's `make_env`; the first environment that a run makes is
    the one it trains in, all others are for evaluations.
    """

    def __init__(self):
        self.training = 0
        self.evaluation = 0
        self.actions = {}
        self.made = 0

    def at(self, kind, number, action):
        self.actions[kind, number] = action
        return self

    def send(self, kind, number, signal_number):
        """Send this process a signal in the `number`-th step of this kind."""
        return self.at(kind, number, lambda: os.kill(os.getpid(), signal_number))

    def watch(self, patch, module):
        make = module.make_env

        def make_watched(*args, **kwargs):
            kind = "training" if self.made == 0 else "evaluation"
            self.made += 1
            return StepHook(make(*args, **kwargs), lambda: self.count(kind))

        patch.setattr(module, "make_env", make_watched)
        return self

    def count(self, kind):
        number = getattr(self, kind) + 1
        setattr(self, kind, number)
        self.actions.get((kind, number), lambda: None)()
