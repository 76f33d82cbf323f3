"""On a GPU the scripts compute in the right place and type, and an update never waits.

No GPU is needed: both agents run at the paper's sizes with fake CUDA tensors (see `fake_cuda.py`).
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor

import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from helpers.fake_cuda import (
    GPU, OVERWRITTEN, PAGEABLE, READ_EARLY, WAITS, WAITS_FOR_COPY, FakeCuda, WouldFail,
    missing_device, unwatched)

pytestmark = pytest.mark.skipif(missing_device() is not None, reason=str(missing_device()))

CPU = torch.device("cpu")
ROWS = 24  # in the replay before the walk
LOGGED = (0, 1)  # updates that log; 0 also makes the states of the optimisers
UPDATES = 4


# ---------------------------------------------------------------------- the scripts
class DMC:
    """How a run of `sac_mooss_dmc.py` calls its parts."""

    module = dmc
    env_id = "reacher-easy"
    num_actions = 2
    updates_per_step = 1

    def __init__(self, args, home):
        self.shape = (args.frame_stack, 3, args.render_size, args.render_size)
        self.agent = dmc.Agent(args, self.shape, self.num_actions, GPU)
        self.replay = dmc.SequenceReplay(
            args.buffer_size, self.shape[1:], self.num_actions, args.frame_stack, home)

    def add(self, frame):
        self.replay.add(np.zeros(self.num_actions, np.float32), 0.1, False, frame)

    def act(self, obs):
        return self.agent.act(obs)

    def act_in_evaluation(self, obs):
        return self.agent.act(obs, deterministic=True)

    def update(self, number, log):
        self.agent.update(self.replay, number, log)


class Atari:
    """How a run of `rainbow_mooss_atari.py` calls its parts."""

    module = atari
    env_id = "Breakout"
    num_actions = 4
    updates_per_step = 2

    def __init__(self, args, home):
        channels = 1 if args.gray_scale else 3
        self.shape = (args.frame_stack, channels, args.image_size, args.image_size)
        self.agent = atari.Agent(args, self.shape, self.num_actions, GPU)
        self.replay = atari.SequenceReplay(
            args.buffer_size, self.shape[1:], args.frame_stack, args.seq_len, args.multi_step,
            home)
        self.noisy = args.noisy

    def add(self, frame):
        self.replay.add(1, 0.1, False, frame)

    def act(self, obs):
        return self.agent.act(obs, noisy=self.noisy)

    def act_in_evaluation(self, obs):
        return self.agent.act(np.stack([obs] * 3))

    def update(self, number, log):
        self.agent.update(self.replay, number, 0.5, log)


SCRIPTS = {"dmc": DMC, "atari": Atari}


# ---------------------------------------------------------------------- the walk
@dataclasses.dataclass
class Walk:
    """What a walk leaves to look at."""

    mode: FakeCuda
    run: object
    launches: list

    def faults(self):
        """Faults of the loop; each call of `act` may wait once, for its action."""
        waits = [fault for fault in self.mode.faults if fault.phase.startswith("act")
                 and fault.kind == WAITS]
        pardoned = {id(next(fault for fault in waits if fault.phase == phase))
                    for phase in {fault.phase for fault in waits}}
        return [fault for fault in self.mode.faults
                if fault.phase not in ("setup", "pictures") and id(fault) not in pardoned]


def walk(script, home=GPU, updates=UPDATES, **changes):
    """Act, learn and store as a run does, on a fake GPU."""
    kind = SCRIPTS[script]
    args = kind.module.resolve_args(kind.module.Args(env_id=kind.env_id, **changes))
    rng = np.random.default_rng(0)
    mode = FakeCuda()
    launches = []
    with mode, pytest.MonkeyPatch.context() as patch:
        # The walk has no use for the values that orthogonal matrices take seconds to get.
        patch.setattr(torch.nn.init, "orthogonal_", lambda tensor, *_, **__: tensor)
        # So small a block that the walk comes to the next one.
        patch.setattr(kind.module.MaskBank, "BLOCK", 3)
        masks = unwatched(kind.module.random_walk_masks)
        patch.setattr(kind.module, "random_walk_masks", masks)
        run = kind(args, home)
        obs = rng.integers(0, 256, run.shape, dtype=np.uint8)
        run.replay.begin_episode(obs[-1])
        for _ in range(ROWS):
            run.add(obs[-1])
        for number in range(updates):
            if number % run.updates_per_step == 0:
                with mode.phase_of(f"act {number}"):
                    assert isinstance(run.act(obs), (np.ndarray, np.integer))
            before = len(mode.operators)
            with mode.phase_of("update"):
                run.update(number, number in LOGGED)
            launches.append(sum(
                starts for phase, _, starts in mode.operators[before:] if phase == "update"))
            with mode.phase_of("add"):
                run.add(obs[-1])
                run.replay.begin_episode(obs[-1])
        with mode.phase_of("act in evaluation"):
            assert isinstance(run.act_in_evaluation(obs), np.ndarray)
        if args.aux_weight > 0:
            with mode.phase_of("pictures"):
                for picture in kind.module.mooss_pictures(run.agent, run.replay, 0).values():
                    assert picture.dtype == torch.uint8
    return Walk(mode, run, launches)


def listed(faults):
    """One line for each fault, however often it was met."""
    return "".join(f"\n  {line}" for line in dict.fromkeys(map(str, faults)))


# ---------------------------------------------------------------------- variants
# One walk tries several flags at once where they do not touch.
VARIANTS = {
    "dmc": {
        "paper": {},
        "base": dict(aux_weight=0.0),
        "authors": dict(preset="authors"),
        "decoder none": dict(
            decoder_inputs="none", crop_per_sequence=True, normalize_embeddings=False),
        "decoder s": dict(
            decoder_inputs="s", augmentations=("intensity",), rl_intensity=True, share_mask=True),
        "decoder sar": dict(
            decoder_inputs="sar", mask_type="cube", augmentations=(), level_reduction="sum"),
        "bf16": dict(amp="bf16"),
        "bf16 base": dict(amp="bf16", aux_weight=0.0, optimizer="adamw"),
    },
    "atari": {
        "paper": {},
        "base": dict(aux_weight=0.0),
        "decoder none": dict(
            decoder_inputs="none", aux_is_weights=False, crop_per_sequence=True,
            normalize_embeddings=False),
        "decoder s": dict(decoder_inputs="s", share_mask=True, augmentations=("intensity",)),
        "decoder sar": dict(
            decoder_inputs="sar", mask_type="cube", augmentations=(), level_reduction="sum"),
        "not noisy": dict(noisy=False),
        "not dueling": dict(dueling=False, frame_stack=3),
        "not distributional": dict(distributional=False),
        "plain DQN": dict(noisy=False, dueling=False, distributional=False, aux_weight=0.0),
        "colour": dict(gray_scale=False),
        "bf16": dict(amp="bf16"),
        "bf16 base": dict(amp="bf16", aux_weight=0.0, distributional=False, noisy=False),
    },
}
CASES = {
    f"{script} {name}": (script, changes) for script, variants in VARIANTS.items()
    for name, changes in variants.items()}
EVERY_VARIANT = pytest.mark.parametrize("script,changes", CASES.values(), ids=CASES.keys())


@functools.cache
def walk_of(script, changes):
    return walk(script, **dict(changes))


def variant(script, changes):
    """The walk of a variant, made once for all tests that look at it."""
    return walk_of(script, tuple(changes.items()))


# A replay in the host's memory holds real frames, so that it and its batches are small here.
SMALL = {
    "dmc": dict(buffer_size=300, batch_size=8, aux_batch_size=4),
    "atari": dict(buffer_size=300, batch_size=4),
}


# ---------------------------------------------------------------------- tests
@EVERY_VARIANT
def test_nothing_waits_and_copies_come_from_pinned_memory(script, changes):
    faults = variant(script, changes).faults()
    assert not faults, listed(faults)


@EVERY_VARIANT
def test_every_tensor_is_on_the_gpu_after_updates(script, changes):
    run = variant(script, changes).run
    agent, replay = run.agent, run.replay
    learnt = [*agent.named_parameters(), *agent.named_buffers()]
    learnt += [(f"gradient of {name}", parameter.grad) for name, parameter in
               agent.named_parameters() if parameter.grad is not None]
    learnt += [(f"state of {name}", value) for name, optimizer in agent.optimizers.items()
               for state in optimizer.state.values() for value in state.values()]
    learnt += [(name, value) for name, value in agent.metrics.items()
               if isinstance(value, torch.Tensor)]
    stored = [(name, value) for name, value in vars(replay).items()
              if isinstance(value, torch.Tensor)]
    frames = max(stored, key=lambda pair: pair[1].nbytes)
    for name, value in [*learnt, frames]:
        assert isinstance(value, FakeTensor) and value.device == GPU, name
    assert any(name.startswith("losses/") for name, _ in learnt)
    assert all(parameter.dtype == torch.float32 for parameter in agent.parameters())


@EVERY_VARIANT
def test_a_replay_in_host_memory_sends_pinned_memory(script, changes):
    """The priorities of Atari come back to a replay on the host: one wait an update."""
    walked = walk(script, home=CPU, **SMALL[script], **changes)
    faults = walked.faults()
    waits = [fault for fault in faults if fault.kind == WAITS and fault.phase == "update"]
    if script == "atari":
        assert len(waits) == UPDATES, listed(waits)
        faults = [fault for fault in faults if fault not in waits]
    assert not faults, listed(faults)


@pytest.mark.parametrize("script,most_even,most_odd", [("dmc", 750, 600), ("atari", 900, 900)])
def test_an_update_is_few_calls(script, most_even, most_odd):
    """Each call that gives the GPU work costs some microseconds of the host."""
    launches = variant(script, {}).launches
    even = launches[2]
    odd = launches[3]
    print(f"\n{script}: {even} / {odd} calls in an even / odd update that is not logged")
    assert 0 < even <= most_even
    assert 0 < odd <= most_odd


@EVERY_VARIANT
def test_networks_compute_in_the_type_of_the_flag(script, changes):
    """bf16 is for convolutions and linear layers; similarities and losses stay in float32."""
    walked = variant(script, changes)
    wanted = torch.bfloat16 if changes.get("amp") == "bf16" else torch.float32
    products = [product for product in walked.mode.products if product[0] != "setup"]
    network = ("aten::convolution", "aten::convolution_backward", "aten::addmm")
    wrong = {f"{name} in {dtype} at {where}" for _, name, dtype, where in products
             if name in network and dtype != wanted}
    assert not wrong, wrong
    assert {name for _, name, _, _ in products} >= set(network)
    assert walked.mode.losses
    wrong = {loss for loss in walked.mode.losses if loss[1] != torch.float32}
    assert not wrong, wrong
    if changes.get("aux_weight") != 0.0:
        assert any(name == "aten::mm" and dtype == torch.float32
                   for _, name, dtype, _ in products), "no product in float32: similarities?"


# ---------------------------------------------------------------------- faults
def plant(monkeypatch, fault):
    """Have the optimiser's step call `fault(x)` with a vector on the GPU."""
    step = torch.optim.Adam.step

    def faulty(self, *args, **kwargs):
        fault(torch.ones(5, device=GPU))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", faulty)


def planted_faults(script="dmc"):
    """Faults of one small update that were noted at an optimiser's step, where the plant is."""
    small = {"dmc": dict(num_filters=4, hidden_dim=16), "atari": dict(hidden_units=16)}
    walked = walk(script, updates=1, aux_weight=0.0, **small[script])
    return [fault for fault in walked.faults() if ".step(" in fault.where]


GOES_ON_AFTER_WAITING = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "truth": lambda x: bool(x.sum() > 0),
    "is_nonzero": lambda x: torch.is_nonzero(x.sum()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, 2 * x),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu", torch.float64),
    "copy to the host": lambda x: torch.zeros(5).copy_(x),
    "copy to pageable memory": lambda x: torch.zeros(5).copy_(x, non_blocking=True),
    "assignment to the host": lambda x: torch.zeros(5).__setitem__(slice(None), x),
    "tolist": lambda x: x.tolist(),
    "range of a tensor": lambda x: range(x.sum().long()),
    "non-finite gradients": lambda x: torch.nn.utils.clip_grad_norm_(
        [grad_of(x)], 1.0, error_if_nonfinite=True),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
STOPS_AT_WAITING = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 0),
    "mask as an index": lambda x: x[x > 0],
    "assignment of many to a mask": lambda x: x.__setitem__(x > 0, torch.ones(5, device=GPU)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "unique rows": lambda x: x.view(5, 1).unique(dim=0),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "combinations": lambda x: torch.combinations(x),
    "multinomial": lambda x: x.multinomial(3),
    "inverse": lambda x: torch.linalg.inv(x.diag()),
}
WAITS_FOR_A_COPY = {
    "number to the GPU": lambda x: torch.tensor(1.0, device=GPU),
    "element set to a number": lambda x: x.__setitem__(0, 1.0),
    "list to the GPU": lambda x: x.new_tensor([1.0, 2.0]),
    "pinned but blocking": lambda x: torch.zeros(5).pin_memory().to(GPU),
    "indices on the host": lambda x: x[torch.tensor([0, 1])],
    "indices in a list": lambda x: x[[0, 1]],
}
DOES_NOT_WAIT = {
    "number in an operator": lambda x: x * 2.0 + 1,
    "number of the host in an operator": lambda x: x * torch.tensor(2.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "number to a mask": lambda x: x.__setitem__(x > 0, 0.0),
    "slice set to a number": lambda x: x.__setitem__(slice(0, 1), 1.0),
    "indices on the GPU": lambda x: x[torch.arange(2, device=GPU)],
    "repeat_interleave of a number": lambda x: x.repeat_interleave(2),
    "repeat_interleave with a size": lambda x: x.repeat_interleave(x.long(), output_size=5),
    "pinned copy": lambda x: torch.zeros(1000).pin_memory().to(GPU, non_blocking=True),
    "copy from pinned empty memory": lambda x: x.copy_(
        torch.empty(5, pin_memory=True), non_blocking=True),
    "copy to the host that is not waited for": lambda x: x.to("cpu", non_blocking=True),
    "copy to pinned memory": lambda x: torch.empty(5, pin_memory=True).copy_(
        x, non_blocking=True),
    "shape for the host": lambda x: torch.zeros_like(x, device="cpu").numpy(),
    "few bytes": lambda x: torch.zeros(2).to(GPU, non_blocking=True),
}


def grad_of(x):
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    return parameter


def overwrite_in_flight(x):
    staging = torch.zeros(1000, pin_memory=True)
    copied = staging.to(GPU, non_blocking=True)
    staging.numpy()[:] = 1.0
    return copied


@pytest.mark.parametrize("name", GOES_ON_AFTER_WAITING)
def test_a_planted_wait_is_found(name, monkeypatch):
    plant(monkeypatch, GOES_ON_AFTER_WAITING[name])
    faults = planted_faults()
    assert faults and {fault.kind for fault in faults} == {WAITS}, listed(faults)
    assert all(fault.where.startswith("sac_mooss_dmc.py:") for fault in faults)


@pytest.mark.parametrize("name", STOPS_AT_WAITING)
def test_a_planted_wait_for_a_shape_is_found(name, monkeypatch):
    plant(monkeypatch, STOPS_AT_WAITING[name])
    with pytest.raises(WouldFail, match=rf"{WAITS}.*sac_mooss_dmc.py:\d+: .*\.step\("):
        planted_faults()


@pytest.mark.parametrize("name", WAITS_FOR_A_COPY)
def test_a_planted_blocking_copy_is_found(name, monkeypatch):
    plant(monkeypatch, WAITS_FOR_A_COPY[name])
    faults = planted_faults("atari")
    assert {fault.kind for fault in faults} == {WAITS_FOR_COPY}, listed(faults)
    assert all(fault.where.startswith("rainbow_mooss_atari.py:") for fault in faults)


@pytest.mark.parametrize("fault,kind", [
    (lambda x: torch.zeros(1000).to(GPU, non_blocking=True), PAGEABLE),
    (lambda x: torch.ones(1000, device=GPU).copy_(torch.zeros(1000), non_blocking=True), PAGEABLE),
    (overwrite_in_flight, OVERWRITTEN),
    (lambda x: x.to("cpu", non_blocking=True) + 1, READ_EARLY)])
def test_a_planted_careless_copy_is_found(fault, kind, monkeypatch):
    plant(monkeypatch, fault)
    faults = planted_faults()
    assert {fault.kind for fault in faults} == {kind}, listed(faults)


@pytest.mark.parametrize("name", DOES_NOT_WAIT)
def test_what_does_not_wait_is_not_accused(name, monkeypatch):
    plant(monkeypatch, DOES_NOT_WAIT[name])
    faults = planted_faults()
    assert not faults, listed(faults)


@pytest.mark.parametrize("fault", [
    lambda x: x + torch.ones(5),
    lambda x: torch.cat([x, torch.ones(5)]),
    lambda x: torch.ones(5)[x.long()],
    lambda x: torch.where(x > 0, x, torch.ones(5)),
    lambda x: x.add_(torch.ones(5)),
    lambda x: torch.nn.functional.mse_loss(x, torch.ones(5))])
def test_a_planted_mix_of_devices_is_found(fault, monkeypatch):
    plant(monkeypatch, fault)
    with pytest.raises(WouldFail, match=r"sac_mooss_dmc.py:\d+: .*\.step\(.*device"):
        planted_faults()


@pytest.mark.parametrize("fault", [lambda x: x.numpy(), lambda x: f"{x.sum():.3f}"])
def test_a_planted_read_that_fake_tensors_refuse_is_found(fault, monkeypatch):
    plant(monkeypatch, fault)
    with pytest.raises((RuntimeError, TypeError)):
        planted_faults()


def test_bf16_that_does_not_reach_the_networks_is_found(monkeypatch):
    """Autocast for another device changes nothing on this one."""
    autocast = torch.autocast
    monkeypatch.setattr(torch, "autocast", lambda device, *args, **kwargs:
                        autocast("cpu", *args, **kwargs))
    walked = walk("dmc", updates=1, amp="bf16", aux_weight=0.0)
    types = {dtype for _, name, dtype, _ in walked.mode.products if name == "aten::convolution"}
    assert types == {torch.float32}


def test_the_walk_leaves_torch_as_it_was():
    walk("dmc", updates=1, aux_weight=0.0)
    assert torch.accelerator.is_available() == torch.cuda.is_available()
    x = torch.ones(3, requires_grad=True)
    (x[:2] ** 2).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 0.0]
