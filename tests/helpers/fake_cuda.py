"""A GPU that computes nothing: tensors on `cuda:0` are fake, tensors on the CPU are real.

`FakeCuda` is a mode under which a script runs as it would on a GPU, at the paper's sizes, on any
machine. The host's work (numpy, masks, a replay in host memory) is done; the device's work only
has shapes, types and places. Every operator of the device passes through the mode, which counts it
and notes what would be wrong on a real GPU:

- an operator that makes the host wait until the device has done all that was queued before it;
- a copy to the device that is not from pinned memory, or that the host waits for;
- pinned memory that is written to again while a copy from it may still be under way;
- memory of the host that is used while a copy into it may still be under way;
- tensors of two devices in one operator.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import linecache
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = {str(ROOT / name) for name in ("sac_mooss_dmc.py", "rainbow_mooss_atari.py")}
GPU = torch.device("cuda", 0)
FEW_BYTES = 64

aten = torch.ops.aten

# Operators that wait although their output is a tensor of a fixed shape: CUDA reads an error code,
# or a check of the input, back. What waits by nature (item, nonzero, ...) is known by its tag.
READS_A_CHECK = {"aten::_linalg_check_errors", "aten::_linalg_eigh", "aten::_linalg_svd",
                 "aten::multinomial"}
COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}

# Products of matrices, and which of their arguments tells the type that they are computed in.
PRODUCTS = {"aten::convolution": 0, "aten::convolution_backward": 1, "aten::addmm": 1,
            "aten::mm": 0, "aten::bmm": 0, "aten::baddbmm": 1,
            "aten::_scaled_dot_product_flash_attention": 0,
            "aten::_scaled_dot_product_efficient_attention": 0}
# What losses are made of, and which of their arguments tells the type.
LOSSES = {"aten::_log_softmax": 0, "aten::mse_loss": 0, "aten::smooth_l1_loss": 0,
          "aten::logsumexp": 0}

WAITS = "the host waits for the device"
WAITS_FOR_COPY = "the host waits for a copy to the device"
PAGEABLE = "a copy from pageable memory"
OVERWRITTEN = "pinned memory changed while a copy from it was under way"
READ_EARLY = "host memory is read while a copy into it may be under way"


class WouldFail(AssertionError):
    """Something that a real GPU would refuse, or a wait for a shape, beyond which no walk leads."""


@dataclasses.dataclass
class Fault:
    """Something a GPU would suffer from: what, by which operator, where, in which phase."""

    kind: str
    operator: str
    where: str
    phase: str

    def __str__(self):
        return f"{self.phase}: {self.kind}: {self.operator} at {self.where}"


# ---------------------------------------------------------------------- the device
def missing_device():
    """Why fake CUDA tensors cannot be used here, or None."""
    if torch.cuda.is_available() or shutil.which("g++"):
        return None
    return "this torch has no CUDA and there is no g++ to build its stand-in"


@functools.cache
def stand_in_library():
    """The compiled stand-in for a CUDA device; g++ takes about a second."""
    source = Path(__file__).with_name("fake_cuda.cpp")
    torch_home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fake_cuda.so"
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_home / 'include'}", str(source),
             f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


@contextlib.contextmanager
def fake_device():
    """Guard and hooks of a CUDA device while the block runs; nothing to do where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    library = stand_in_library()
    library.swap_cuda()
    try:
        yield
    finally:
        library.swap_cuda()


# ---------------------------------------------------------------------- the mode
class FakeCuda(TorchDispatchMode):
    """Run operators of the host, imitate those of the device, and note faults and counts."""

    def __init__(self):
        super().__init__()
        self.fake_mode = FakeTensorMode()
        self.phase = "setup"
        self.faults = []
        self.operators = []
        self.products = []
        self.losses = []
        self.pinned = {}
        self.in_flight = []
        self.arriving = {}

    def __enter__(self):
        # Autocast turns itself off where there is no GPU, and torch uses its kernels for lists of
        # tensors only for classes that it knows. A backward pass on this thread keeps the line of
        # the script that asked for it on the stack.
        with contextlib.ExitStack() as stack:
            stack.enter_context(fake_device())
            stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available",
                                           lambda: False))
            stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", lambda *_, **__: True))
            stack.enter_context(mock.patch("torch.cuda.synchronize", self.synchronize))
            stack.enter_context(mock.patch(
                "torch.cuda.get_rng_state", lambda _: torch.get_rng_state()))
            stack.enter_context(mock.patch("torch.cuda.set_rng_state", lambda *_: None))
            stack.enter_context(mock.patch(
                "concurrent.futures.ThreadPoolExecutor.submit", self.submit))
            for name in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
                stack.enter_context(mock.patch(f"{name}._foreach_supported_types",
                                               [torch.Tensor, torch.nn.Parameter, FakeTensor]))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self.fake_mode)
            self.leave = stack.pop_all()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.end_of_copies()
        self.leave.close()

    @contextlib.contextmanager
    def phase_of(self, name):
        """Name the phase in which faults and operators of the block are noted."""
        before, self.phase = self.phase, name
        try:
            yield
        finally:
            self.phase = before

    def note(self, kind, operator, where=None):
        self.faults.append(Fault(kind, operator, where or script_line(), self.phase))

    def wait(self, operator, kind=WAITS):
        """The host waits: all that was queued is done, all copies too."""
        self.note(kind, operator)
        self.end_of_copies()

    def synchronize(self, *_):
        self.wait("torch.cuda.synchronize")

    def submit(self, function, *args, **kwargs):
        """Run a thread's work here and now: modes do not reach into threads."""
        future = concurrent.futures.Future()
        with self.phase_of("thread"):
            future.set_result(function(*args, **kwargs))
        return future

    # ---------------------------------------------------------------------- pinned memory
    def pin(self, tensor):
        storage = tensor.untyped_storage()
        self.pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor):
        reference = self.pinned.get(tensor.untyped_storage()._cdata)
        return reference is not None and not reference.expired()

    def end_of_copies(self):
        """Until here a copy may have been under way: its source must still be what it was."""
        for source, before, where in self.in_flight:
            if checksum(source) != before:
                self.note(OVERWRITTEN, "copy", where)
        self.in_flight.clear()
        self.arriving.clear()

    # ---------------------------------------------------------------------- dispatch
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "prim":  # a fake tensor is asked for its device
            return function(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        tensors = tensors_among((*args, *kwargs.values()))
        host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor)]
        target = kwargs.get("device")
        # `zeros_like(x, device="cpu")` takes no more than the shape from the device.
        makes_host_tensor = is_on(target, "cpu") and function.overloadpacket is not aten._to_copy
        if is_on(target, "cuda") or (len(host) < len(tensors) and not makes_host_tensor):
            return self.on_device(function, args, kwargs, host)
        with unset_fake_temporarily():
            if len(host) < len(tensors):
                args, kwargs = tree_map_only(FakeTensor, as_real, (args, kwargs))
            return self.on_host(function, args, kwargs)

    def on_host(self, function, args, kwargs):
        """Run the operator; pinned memory is ordinary memory that is remembered as pinned."""
        name = function.name()
        for tensor in tensors_among((*args, *kwargs.values())):
            storage = self.arriving.get(tensor.untyped_storage()._cdata)
            if storage is not None and not function.is_view:
                self.note(READ_EARLY, name)
        if name == "aten::is_pinned":
            return self.is_pinned(args[0])
        if name == "aten::_pin_memory":
            return self.pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self.pin(function(*args, **{**kwargs, "pin_memory": False}))
        return function(*args, **kwargs)

    def on_device(self, function, args, kwargs, host):
        """Imitate the operator, after a look at what it would do to a real device."""
        name = function.name().partition(".")[0]
        self.operators.append((self.phase, name, starts_a_kernel(function, name)))
        if name in PRODUCTS:
            self.products.append((self.phase, name, args[PRODUCTS[name]].dtype, script_line()))
        if name in LOSSES:
            self.losses.append((name, args[LOSSES[name]].dtype, script_line()))
        if name == "aten::copy_" and host and args[0] is host[0]:
            return self.copy_to_host(name, args[1], args[0], is_non_blocking(args, kwargs))
        if name == "aten::_to_copy" and not host and is_on(kwargs.get("device"), "cpu"):
            with unset_fake_temporarily():
                copied = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if kwargs.get("non_blocking"):
                # Torch chooses pinned memory for such a copy by itself.
                self.pin(copied)
            return self.copy_to_host(name, args[0], copied, kwargs.get("non_blocking"))
        if torch.Tag.data_dependent_output in function.tags:
            self.wait(name)
            return 0.0 if args[0].is_floating_point() else 0
        if waits(function, name, args, kwargs):
            self.wait(name)
            raise WouldFail(str(self.faults[-1]))
        if name in INDEXING and host and args[0] is host[0]:
            raise WouldFail(f"{self.phase}: {name} at {script_line()}: indices on another device")
        for tensor in host:
            self.look_at_host_tensor(name, tensor, args, kwargs)
        if host:
            args, kwargs = tree_map_only(torch.Tensor, as_fake, (args, kwargs))
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            message = f"{self.phase}: {name} at {script_line()}: {error}"
            raise WouldFail(message) from error

    def copy_to_host(self, name, source, target, non_blocking):
        if non_blocking and self.is_pinned(target):
            storage = target.untyped_storage()
            self.arriving[storage._cdata] = storage
        else:
            self.wait(name)
        return target

    def look_at_host_tensor(self, name, tensor, args, kwargs):
        """A tensor of the host among the inputs: a copy, indices that torch copies, or a number."""
        if name in COPIES:
            if not is_non_blocking(args, kwargs):
                self.wait(name, WAITS_FOR_COPY)
            elif self.is_pinned(tensor):
                self.in_flight.append((tensor, checksum(tensor), script_line()))
            elif tensor.nbytes > FEW_BYTES:
                self.note(PAGEABLE, name)
        elif name in INDEXING and tensor.dim() > 0:
            self.wait(name, WAITS_FOR_COPY)


def unwatched(function):
    """A function of the host alone, of which not every operator shall cost a look."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        with disable_current_modes():
            return function(*args, **kwargs)
    return call


def tensors_among(values):
    """The tensors among an operator's arguments, and in the lists among them."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_among(value)
    return found


@functools.cache
def starts_a_kernel(function, name):
    """Whether the operator gives the device work, unlike a view or a piece of empty memory."""
    return not (function.is_view or name in ("aten::detach", "aten::_unsafe_view")
                or name.startswith(("aten::empty", "aten::new_empty")))


def is_on(device, kind):
    return device is not None and torch.device(device).type == kind


def is_non_blocking(args, kwargs):
    """The flag of `copy_(to, from, non_blocking)` and of `_to_copy(..., non_blocking=...)`."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def waits(function, name, args, kwargs):
    """Whether CUDA must read something back from the device before it can go on."""
    if name in INDEXING:
        masks = [index is not None and index.dtype in (torch.bool, torch.uint8)
                 for index in args[1]]
        # One number for all chosen places becomes a masked fill, which does not wait.
        return any(masks) and (name == "aten::index" or args[2].numel() != 1)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return name in READS_A_CHECK or torch.Tag.dynamic_output_shape in function.tags


def as_fake(tensor):
    """A fake twin on the CPU of a real tensor; called while the fake mode is active."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def as_real(tensor):
    """Host memory in the shape of a fake tensor; called while the fake mode is not active."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def checksum(tensor):
    with unset_fake_temporarily():
        return zlib.adler32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def script_line():
    """The innermost line of the scripts on the stack, as `file:line: text`."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename not in SCRIPTS:
        frame = frame.f_back
    if frame is None:
        return "no line of the scripts"
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{os.path.basename(file)}:{line}: {linecache.getline(file, line).strip()}"
