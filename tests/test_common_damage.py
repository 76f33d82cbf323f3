"""Random damage to whole run folders: a resumed run is right, or one sentence says what is wrong.

Files of a tiny run are deleted, cut, flipped, emptied, replaced by a folder or by garbage, or
swapped with the other checkpoint's or with another run's. Whatever was hit, a resume ends with code
0 and the bytes of the run that was never touched, or with code 2 and a sentence, never with a
traceback; and a resume that was refused has lost nothing: with the damage undone, it ends well.
"""

import contextlib
import io
import os
import random
import re
import shutil
import signal
import sys

import pytest

import mooss_common as common
import rainbow_mooss_atari as atari
import sac_mooss_dmc as dmc
from conftest import ROOT
from helpers import runs, tiny

sys.path.insert(0, str(ROOT / "benchmark"))
import report

# So short that a case takes a tenth of a second: checkpoints at three moments, some updates
# between them, and what remains to do after the one before the last.
FLAGS = {
    dmc: dict(
        tiny.DMC_FLAGS, total_timesteps=60, eval_every=1000, checkpoint_every=20, log_every=1,
        eval_episodes=1),
    atari: dict(
        tiny.ATARI_FLAGS, total_timesteps=42, checkpoint_every=14, log_every=1, eval_episodes=1),
}
BOTH = pytest.mark.parametrize("module", [dmc, atari], ids=["dmc", "atari"])
CASES = 100


@pytest.fixture(autouse=True)
def quick_start(dot_env, dot_game, monkeypatch):
    """Without what each run asks git and the machine at its start."""
    monkeypatch.setattr(common, "provenance", lambda *_: {})
    monkeypatch.setattr(common, "print_plan", lambda *_: None)


def run(module, root, **changes):
    """Exit code of a run, and what it said on standard error."""
    flags = {**FLAGS[module], "run_root": str(root), "resume": True, **changes}
    error = io.StringIO()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    open_before = set(os.listdir("/proc/self/fd"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        with pytest.raises(SystemExit) as ended:
            common.exit_with(lambda: module.main(module.Args(**flags)))
    code = ended.value.code
    # A process would end here.
    for number in set(os.listdir("/proc/self/fd")) - open_before:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == os.devnull:
                os.close(int(number))
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    return code, error.getvalue()


def only(root):
    """The one run folder below a root."""
    folder, = root.iterdir()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of each script, and one with another seed and other flags."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmc, "make_env", tiny.make_dot_env)
        patch.setattr(atari, "make_env", tiny.make_dot_game)
        for module in (dmc, atari):
            root = tmp_path_factory.mktemp(module.__name__)
            assert run(module, root / "whole") == (0, "")
            assert run(module, root / "other", seed=2, gamma=0.9) == (0, "")
            made[module] = only(root / "whole"), only(root / "other")
    return made


# ----------------------------------------------------------------------------------------- damage
def remove(path):
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def spoil(path, kind, folder, other, dice):
    """Damage one file; what was done, in words, or None where this kind does not apply."""
    name = str(path.relative_to(folder))
    data = path.read_bytes() if path.is_file() else b""
    if kind == "swapped with the other checkpoint":
        if path.name not in common.CHECKPOINT_NAMES:
            return None
        first, second = (folder / name for name in common.CHECKPOINT_NAMES)
        if not (first.is_file() and second.is_file()):
            return None
        contents = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(contents)
        return "checkpoints swapped"
    if kind == "of another run":
        theirs = other / name
        if not theirs.is_file() or not path.is_file():
            return None
        path.write_bytes(theirs.read_bytes())
        return f"{name} of another run"
    if kind in ("flipped", "cut") and not data:
        return None
    if kind == "flipped":
        place = dice.randrange(len(data))
        bit = dice.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1:])
        return f"bit {bit} of byte {place} of {len(data)} flipped in {name}"
    if kind == "cut":
        length = dice.randrange(len(data))
        path.write_bytes(data[:length])
        return f"{name} cut from {len(data)} bytes to {length}"
    remove(path)
    if kind == "emptied":
        path.write_bytes(b"")
    elif kind == "garbage":
        path.write_bytes(dice.randbytes(dice.randrange(1, 3000)))
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        assert kind == "deleted"
    return f"{name} {kind}"


KINDS = ["deleted", "cut", "flipped", "flipped", "emptied", "garbage", "a folder",
         "a link to nothing", "of another run", "swapped with the other checkpoint"]


def damage(folder, other, dice):
    """Damage one file, sometimes two or three; what was done to which."""
    done = {}
    wanted = dice.choice([1, 1, 1, 2, 3])
    while len(done) < wanted:
        files = sorted(path for path in folder.rglob("*") if path.name != "videos")
        path = dice.choice(files)
        if path in done:
            continue
        what = spoil(path, dice.choice(KINDS), folder, other, dice)
        if what is not None:
            done[path] = what
            if what == "checkpoints swapped":
                done.update({folder / name: what for name in common.CHECKPOINT_NAMES})
    return done


# ----------------------------------------------------------------------------------------- resume
def fault_of(code, said, folder, whole):
    """What is wrong with how a resume ended, or None."""
    lines = said.splitlines()
    if code == 0:
        try:
            runs.assert_same_run(whole, folder)
        except Exception as error:  # whatever it is, the run is not what it should be
            return f"ended with 0, but wrong: {type(error).__name__}: {str(error)[:200]}"
        if not re.fullmatch(r"(skipping a checkpoint: [^\n]+\n)?", said):
            return f"ended with 0, saying {said}"
    elif code == 2:
        if not re.fullmatch(r"error: .{10,400}", lines[-1]) or str(folder) not in lines[-1]:
            return f"ended with 2, saying {said}"
        if any(not line.startswith("skipping a checkpoint: ") for line in lines[:-1]):
            return f"said more than a sentence: {said}"
        if "out of memory" in said:
            return f"blames the memory: {said}"
    else:
        return f"ended with {code}, saying {said}"
    return None


def put_back(hit, folder, whole):
    """What was damaged becomes what it was before; the process that held the lock is gone."""
    hit = {*hit, folder / ".lock"}
    for path in hit:
        if path.is_symlink() or path.exists():
            remove(path)
    for path in sorted(hit):  # folders before what is in them
        source = whole / path.relative_to(folder)
        shutil.copytree(source, path, dirs_exist_ok=True) if source.is_dir() else shutil.copy(
            source, path)


def try_cases(module, finished, tmp_path, cases, seed):
    whole, other = finished[module]
    dice = random.Random(seed)
    faults = []
    codes = {0: 0, 2: 0}
    for number in range(cases):
        root = tmp_path / str(number)
        folder = root / whole.name
        shutil.copytree(whole, folder)
        hit = damage(folder, other, dice)
        described = ", ".join(dict.fromkeys(hit.values()))
        try:
            code, said = run(module, root)
        except Exception as error:
            faults.append(f"{described}: {type(error).__name__}: {str(error)[:200]}")
        else:
            codes[code] = codes.get(code, 0) + 1
            fault = fault_of(code, said, folder, whole)
            if code == 2 and not fault:
                put_back(hit, folder, whole)
                code, said = run(module, root)
                fault = fault_of(code, said, folder, whole)
                if code == 2 and not fault:
                    fault = f"put back, and still: {said}"
            if fault:
                faults.append(f"{described}: {fault}")
        shutil.rmtree(root)
    return faults, codes


@BOTH
@pytest.mark.parametrize("name", ["checkpoint.pt", "replay"])
def test_what_another_run_has_saved_is_never_taken_for_ones_own(name, module, finished, tmp_path):
    """The newest checkpoint falls back to the one before; of the rows, there is only one copy."""
    whole, other = finished[module]
    folder = tmp_path / whole.name
    shutil.copytree(whole, folder)
    if name == "replay":
        shutil.copytree(other / name, folder / name, dirs_exist_ok=True)
    else:
        shutil.copy(other / name, folder / name)
    code, said = run(module, tmp_path)
    assert code == 2 or (code == 0 and name == "checkpoint.pt")
    assert fault_of(code, said, folder, whole) is None


@BOTH
def test_a_damaged_run_resumes_rightly_or_says_what_is_wrong(module, finished, tmp_path):
    faults, codes = try_cases(module, finished, tmp_path, CASES, seed=0)
    assert not faults, "\n".join(faults)
    print(codes)
    assert min(codes[0], codes[2]) > CASES // 6, codes


# ----------------------------------------------------------------------------------------- report
@BOTH
def test_a_damaged_run_is_reported_rightly_or_skipped_with_a_reason(module, finished, tmp_path):
    """What the report does not read may be damaged as it likes."""
    whole, other = finished[module]
    (expected,), _ = report.read_runs([whole])
    dice = random.Random(1)
    read = 0
    for _ in range(CASES):
        folder = tmp_path / whole.name
        shutil.copytree(whole, folder)
        hit = {path.name for path in damage(folder, other, dice)}
        found, skipped = report.read_runs([tmp_path])
        assert len(found) + len(skipped) == 1, hit
        if not hit & {"args.json", "eval.csv", "train.csv"}:
            assert found == [expected], hit
        assert all(20 < len(reason) < 300 or reason.startswith("no ") for _, reason in skipped)
        read += len(found)
        shutil.rmtree(folder)
    assert CASES // 2 < read < CASES
