"""The Atari replay against plain lists: rows, stacks, returns, sequences, priorities."""

import dataclasses
import math
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

import mooss_common as common
import rainbow_mooss_atari as atari

CPU = torch.device("cpu")
FRAME = (1, 6, 6)
STACK = 4
SEQ_LEN = 5
MULTI_STEP = 3
FOLLOWERS = max(SEQ_LEN - 1, MULTI_STEP)


# --------------------------------------------------------------------------------- plain lists
class GameOfLives(gym.Env):
    """Frames, rewards and deaths at random: three lives of about seven steps each.

    The last life, or a limit of time, ends the game.
    """

    def __init__(self, rng):
        self.rng = rng
        self.observation_space = gym.spaces.Box(0, 255, FRAME, np.uint8)
        self.action_space = gym.spaces.Discrete(4)

    @property
    def ale(self):
        return self

    def lives(self):
        return self.lives_left

    def frame(self):
        return self.rng.integers(1, 256, FRAME, dtype=np.uint8)

    def reset(self, *, seed=None, options=None):
        self.lives_left = 3
        self.time = 0
        return self.frame(), {}

    def step(self, action):
        self.time += 1
        self.lives_left -= int(self.rng.random() < 0.15)
        reward = float(self.rng.normal())
        return self.frame(), reward, self.lives_left == 0, self.time >= 30, {}


@dataclasses.dataclass
class Row:
    """What the plain list holds of a row of the replay; one that closes an episode has no more."""

    stack: np.ndarray
    episode: int
    action: int = None
    reward: float = None
    terminated: bool = False
    game_over: bool = False


def play(seed, capacity, steps):
    """A replay filled as the script fills it, and the plain list of all rows since the start."""
    rng = np.random.default_rng(seed)
    replay = atari.SequenceReplay(capacity, FRAME, STACK, SEQ_LEN, MULTI_STEP, CPU)
    env = atari.LifeEpisodes(GameOfLives(rng))
    env = gym.wrappers.FrameStackObservation(env, STACK, padding_type="zero")
    obs, _ = env.reset(seed=0)
    rows = [Row(obs, 0)]
    replay.begin_episode(obs[-1])
    for _ in range(steps):
        action = int(rng.integers(4))
        obs, reward, terminated, _, info = env.step(action)
        replay.add(action, reward, terminated, obs[-1])
        episode = rows[-1].episode
        rows[-1] = Row(
            rows[-1].stack, episode, action, reward, terminated, terminated and info["game_over"])
        rows.append(Row(obs, episode))
        if terminated:
            obs, _ = env.reset(seed=0 if info["game_over"] else None)
            rows.append(Row(obs, episode + 1))
            replay.begin_episode(obs[-1])
    return replay, rows


def drawable(rows, capacity):
    """Rows with an action, the rows that they need behind them, and their whole stack stored."""
    oldest = max(0, len(rows) - capacity)
    first = oldest + STACK - 1 if oldest > 0 else 0
    newest_complete = len(rows) - 2
    last = newest_complete - FOLLOWERS
    return [row for row in range(first, last + 1) if rows[row].action is not None]


SIZES = [(300, 120), (40, 30), (40, 39), (40, 40), (40, 333)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity,steps", SIZES)
def test_only_whole_rows_are_drawn_and_all_of_them(seed, capacity, steps):
    """Never a row that closes an episode, that lacks followers, or whose stack lost a frame."""
    torch.manual_seed(seed)
    replay, rows = play(seed, capacity, steps)
    drawn, _ = replay.sample(20_000, 0.5)
    assert sorted(set(drawn.tolist())) == drawable(rows, capacity)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity,steps", SIZES)
def test_returns_are_cut_at_ends_of_lives_and_games(seed, capacity, steps):
    """A2: nothing behind a terminal counts, neither rewards nor the value after n steps."""
    replay, rows = play(seed, capacity, steps)
    first_rows = drawable(rows, capacity)
    returns, discounts = replay.returns(torch.tensor(first_rows), 0.9)
    for i, first in enumerate(first_rows):
        value = 0.0
        discount = 1.0
        for row in rows[first:first + MULTI_STEP]:
            value += discount * row.reward
            discount *= 0.9
            if row.terminated:
                discount = 0.0
                break
        assert returns[i].item() == pytest.approx(value, abs=1e-5)
        assert discounts[i].item() == pytest.approx(discount)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity,steps", SIZES)
def test_sequences_are_valid_up_to_the_end_of_a_life_or_game(seed, capacity, steps):
    """A3: the step that ends an episode counts, those behind it do not."""
    replay, rows = play(seed, capacity, steps)
    first_rows = drawable(rows, capacity)
    actions, rewards, valid = replay.sequences(torch.tensor(first_rows))
    assert actions.shape == rewards.shape == valid.shape == (len(first_rows), SEQ_LEN)
    for i, first in enumerate(first_rows):
        for step, row in enumerate(rows[first:first + SEQ_LEN]):
            same_episode = row.episode == rows[first].episode
            assert valid[i, step] == (same_episode and row.action is not None)
            if valid[i, step]:
                assert actions[i, step] == row.action
                assert rewards[i, step] == np.float32(row.reward)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity,steps", SIZES)
def test_stacks_equal_what_the_agent_saw(seed, capacity, steps):
    """At every valid step of a sequence, and where the value after n steps is taken."""
    replay, rows = play(seed, capacity, steps)
    first_rows = torch.tensor(drawable(rows, capacity))
    _, _, valid = replay.sequences(first_rows)
    _, discounts = replay.returns(first_rows, 0.9)
    frames = replay.frames_of(first_rows, SEQ_LEN)
    next_frames = replay.frames_of(first_rows + MULTI_STEP, 1)
    assert frames.shape == (len(first_rows), STACK - 1 + SEQ_LEN, *FRAME)
    for i, first in enumerate(first_rows.tolist()):
        for step in range(SEQ_LEN):
            if valid[i, step]:
                assert (frames[i, step:step + STACK].numpy() == rows[first + step].stack).all()
        if discounts[i] > 0:
            assert (next_frames[i].numpy() == rows[first + MULTI_STEP].stack).all()


def test_the_games_above_hold_every_kind_of_end():
    """Lost lives and ended games both, within a return's reach of rows that are drawn."""
    for capacity, steps in ((300, 120), (40, 333)):
        _, rows = play(0, capacity, steps)
        reached = set()
        for first in drawable(rows, capacity):
            reached |= {row.game_over for row in rows[first:first + MULTI_STEP] if row.terminated}
        assert reached == {False, True}


def test_complete_rows_never_change():
    """Checkpoints rely on it: they append rows to files that they do not write again."""
    replay, _ = play(0, 300, 60)
    newest = replay.newest_row
    before = {name: getattr(replay, name)[:newest].clone() for name in replay.columns}
    for action in range(100):
        replay.add(action % 4, 1.0, False, np.full(FRAME, 9, np.uint8))
    for name, values in before.items():
        assert torch.equal(getattr(replay, name)[:newest], values), name


@pytest.mark.parametrize("capacity,steps", SIZES)
def test_a_restored_replay_draws_the_same_and_goes_on_the_same(capacity, steps):
    """State and complete rows are all there is, also while the newest row waits for its action."""
    replay, _ = play(1, capacity, steps)
    replay.set_priorities(replay.sample(8, 0.5)[0], torch.rand(8), 0.5)
    restored = atari.SequenceReplay(capacity, FRAME, STACK, SEQ_LEN, MULTI_STEP, CPU)
    slots = torch.arange(replay.oldest_row, replay.newest_row) % capacity
    for name in replay.columns:
        getattr(restored, name)[slots] = getattr(replay, name)[slots]
    restored.load_state_dict(replay.state_dict())
    results = []
    for one in (replay, restored):
        torch.manual_seed(2)
        found = []
        for step in range(30):
            rows, weights = one.sample(16, 0.5)
            parts = (*one.returns(rows, 0.9), *one.sequences(rows), one.frames_of(rows, SEQ_LEN))
            found += [rows, weights, *parts]
            terminated = step % 7 == 6
            one.add(step % 4, float(step), terminated, np.full(FRAME, step + 1, np.uint8))
            if terminated:
                one.begin_episode(np.full(FRAME, 100 + step, np.uint8))
        results.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*results))


# ---------------------------------------------------------------------------------- priorities
def with_priorities(seed, capacity=40, steps=333):
    """A replay whose rows have random priorities, and what they are: row -> mass."""
    torch.manual_seed(seed)
    replay, rows = play(seed, capacity, steps)
    live = drawable(rows, capacity)
    priorities = 10 ** (3 * torch.rand(len(live)) - 2)
    replay.set_priorities(torch.tensor(live), priorities, exponent=0.5)
    return replay, dict(zip(live, (priorities.double() ** 0.5).tolist()))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_drawn_in_proportion_to_their_priorities(seed):
    replay, mass = with_priorities(seed)
    draws = 200_000
    drawn, _ = replay.sample(draws, 0.5)
    rows, found = drawn.unique(return_counts=True)
    counts = dict(zip(rows.tolist(), found.tolist()))
    assert counts.keys() <= mass.keys()
    total = sum(mass.values())
    expected = {row: draws * mass[row] / total for row in mass}
    chi_square = sum((counts.get(row, 0) - expected[row]) ** 2 / expected[row] for row in mass)
    assert chi_square < len(mass) + 5 * math.sqrt(2 * len(mass))


def test_sampling_equals_a_plain_cumulative_search():
    replay, mass = with_priorities(3)
    total = sum(mass.values())
    torch.manual_seed(4)
    drawn, _ = replay.sample(3000, 0.5)
    torch.manual_seed(4)
    places = total * torch.rand(3000, dtype=torch.float64)
    in_order_of_slots = sorted(mass, key=lambda row: row % replay.capacity)
    same = 0
    for row, place in zip(drawn.tolist(), places.tolist()):
        passed = 0.0
        for plain in in_order_of_slots:
            passed += mass[plain]
            if passed > place:
                break
        same += row == plain
    assert same >= 2999  # sums may differ in the last bit


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity,steps", [(300, 120), (40, 333)])
def test_no_rounding_leads_to_a_row_without_mass(seed, capacity, steps, monkeypatch):
    """Draws on the very borders between rows, one float beside them, and at both ends."""
    replay, mass = with_priorities(seed, capacity, steps)
    assert (replay.priorities == 0).any()
    borders = replay.priorities.cumsum(0) / replay.priorities.sum()
    above = borders.nextafter(torch.tensor(2.0, dtype=torch.float64))
    below = borders.nextafter(torch.tensor(-1.0, dtype=torch.float64))
    ends = torch.tensor([0.0, 5e-324, 1 - 2**-53, 1.0, 1 + 2**-52], dtype=torch.float64)
    places = torch.cat([borders, above, below, ends])
    asked = []
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: asked.append(shape) or places)
    drawn, weights = replay.sample(len(places), 0.5)
    assert asked == [(len(places),)]
    assert set(drawn.tolist()) == mass.keys()
    assert weights.isfinite().all() and (weights > 0).all() and weights.max() == 1


def test_a_full_replay_of_the_papers_size_never_draws_a_row_without_mass():
    torch.manual_seed(0)
    capacity = 100_000
    replay = atari.SequenceReplay(capacity, (1, 1, 1), 4, 16, 10, CPU)
    replay.newest_row = 150_000
    replay.priorities.copy_(10 ** (6 * torch.rand(capacity, dtype=torch.float64) - 3))
    replay.priorities[torch.rand(capacity) < 0.5] = 0
    drawn, weights = replay.sample(1_000_000, 0.5)
    assert (replay.priorities[drawn % capacity] > 0).all()
    assert ((replay.oldest_row <= drawn) & (drawn <= replay.newest_row)).all()
    assert weights.isfinite().all()


def test_importance_weights_equal_the_formula():
    """(N p)^-beta over the largest of the batch."""
    replay, mass = with_priorities(0)
    drawn, weights = replay.sample(64, beta=0.6)
    total = sum(mass.values())
    plain = np.array([(len(mass) * mass[row] / total) ** -0.6 for row in drawn.tolist()])
    assert np.allclose(weights.numpy(), plain / plain.max(), rtol=1e-5)


def test_priorities_are_clamped_and_raised():
    replay, rows = play(0, 300, 60)
    some = torch.tensor(drawable(rows, 300)[:3])
    replay.set_priorities(some, torch.tensor([0.0, 4.0, 1e9]), exponent=0.5)
    expected = torch.tensor([1e-3, 2.0, 1e3], dtype=torch.float64)
    assert torch.allclose(replay.priorities[some], expected)


def test_new_rows_start_with_priority_one():
    """Whatever the priorities of the others have become."""
    replay, rows = play(1, 300, 60)
    live = drawable(rows, 300)
    assert set(replay.priorities[live].tolist()) == {1.0}
    replay.set_priorities(torch.tensor(live), torch.full((len(live),), 9.0), 0.5)
    for _ in range(20):
        replay.add(0, 0.0, False, np.zeros(FRAME, np.uint8))
    became_drawable = range(len(rows) - 1, len(rows) + 19 - FOLLOWERS)
    assert set(replay.priorities[live].tolist()) == {3.0}
    assert set(replay.priorities[list(became_drawable)].tolist()) == {1.0}


# ---------------------------------------------------------------------------------------- size
def test_100k_steps_take_at_most_three_quarters_of_a_gigabyte():
    replay = atari.SequenceReplay(100_000, (1, 84, 84), 4, 16, 10, torch.device("meta"))
    assert replay.frames.dtype == torch.uint8
    assert common.replay_bytes(replay) + replay.priorities.nbytes <= 0.75e9


@pytest.mark.slow
def test_a_batch_from_a_full_replay_takes_at_most_10_ms():
    """32 sequences of 16, their returns and weights, and priorities written back."""
    replay = atari.SequenceReplay(100_000, (1, 84, 84), 4, 16, 10, CPU)
    replay.frames[::1000] = 7
    replay.newest_row = 99_999
    replay.priorities[:99_980] = torch.rand(99_980, dtype=torch.float64)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        rows, weights = replay.sample(32, 0.5)
        replay.returns(rows, 0.99)
        replay.sequences(rows)
        frames = replay.frames_of(rows, 16)
        replay.frames_of(rows + 10, 1)
        replay.set_priorities(rows, weights, 0.5)
        times.append(time.perf_counter() - began)
    assert frames.shape == (32, 19, 1, 84, 84)
    assert min(times) <= 0.01
