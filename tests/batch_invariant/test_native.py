"""The call of a kernel from Python: what its arguments may be, and that the interpreter is free meanwhile."""

import ctypes
import threading
import time

import pytest
import torch

from zmrl.batch_invariant import native
from zmrl.batch_invariant.native import Int64Array, kernel
from zmrl.batch_invariant.ops.norm import rms_norm
from zmrl.batch_invariant.ops.residual import residual_add

PROBE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_float, ctypes.c_int64)


def call(function: object, signature: str, *arguments: object) -> int:
    """What a kernel's wrapper does, with any C function in the kernel's place; 2 threads."""
    at = ctypes.cast(function, ctypes.c_void_p)
    return native.library().zm_call(at, signature.encode(), arguments, 2)


def test_every_kind_of_argument_arrives():
    seen = []
    probe = PROBE(lambda *values: seen.append(values) or -7)
    tensor, array = torch.zeros(3), Int64Array([5, -6])
    assert (ctypes.c_int64 * 2).from_address(array.data_ptr())[:] == [5, -6]
    for pointer, at in ((tensor, tensor.data_ptr()), (array, array.data_ptr()), (1 << 62, 1 << 62), (None, 0)):
        assert call(probe, "pfif", pointer, 0.5, -3, 2) == -7, "the kernel's own negative status is no error"
        assert seen.pop() == (at, 0.5, -3, 2.0, 2)
    assert call(probe, "pfif", torch.zeros(0), 0.5, 1, 2) == -7 and seen.pop()[1:] == (0.5, 1, 2.0, 2)
    assert call(probe, "pfif", None, -1, -1, -1.0) == -7 and seen.pop() == (0, -1.0, -1, -1.0, 2)
    assert call(probe, "pfif", None, 1.5, True, 0) == -7 and seen.pop() == (0, 1.5, 1, 0.0, 2)


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((None, 0.5, 1), TypeError, "'pfif' was given 3"),
        ((None, 0.5, 1, 0.5, 2), TypeError, "'pfif' was given 5"),
        ((None, 0.5, 1.5, 0.5), TypeError, "expected an integer, got 1.5"),
        ((None, "x", 1, 0.5), TypeError, "str"),
        ((None, 0.5, 1 << 63, 0.5), OverflowError, "too big"),
        (("x", 0.5, 1, 0.5), AttributeError, "data_ptr"),
        ((torch.zeros(2, device="meta"), 0.5, 1, 0.5), TypeError, "not in memory"),
        ((None, 0.5, torch.tensor(2), 0.5), TypeError, "expected an integer, got tensor"),
    ],
)
def test_a_wrong_argument_is_refused_before_the_kernel_runs(arguments, error, says):
    seen = []
    with pytest.raises(error, match=says):
        call(PROBE(lambda *values: seen.append(values) or 0), "pfif", *arguments)
    assert not seen


def test_an_operator_refuses_a_weight_that_is_not_in_memory():
    x, w = torch.zeros(2, 16).bfloat16(), torch.zeros(16).bfloat16().to("meta")
    with pytest.raises(TypeError, match="not in memory"):
        residual_add(x, torch.zeros(2, 16, device="meta").bfloat16())
    with pytest.raises(TypeError, match="not in memory"):
        rms_norm(x, w, 1e-6)


def test_a_signature_longer_than_a_call_can_be_is_refused():
    for signature in ("i" * native.MOST_INTEGERS, "f" * (native.MOST_FLOATS + 1)):
        with pytest.raises(ValueError, match=r"zm_linear: .* more arguments"):
            kernel("zm_linear", signature)


def test_other_threads_of_python_run_while_a_kernel_does():
    started, ends = threading.Event(), []

    def run() -> None:
        started.set()
        usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p)
        native.library().zm_call(usleep, b"", (), 2_000_000)  # its one argument takes the place of the threads
        ends.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    time.sleep(0.1)  # comes back late if the thread keeps the interpreter
    back = time.monotonic()
    thread.join()
    assert ends[0] - back > 1
