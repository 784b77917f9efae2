import pytest
import torch

from kernels import BackendUnavailable
from kernels.cpu import CpuBackend
from kernels.spec import DecoderTraits


@pytest.fixture(scope="session")
def cpu() -> CpuBackend:
    try:
        return CpuBackend(threads=2)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


def packed(backend, traits: DecoderTraits, weights, dtype: torch.dtype, precision: str | None = None):
    """Skips the test where the backend cannot keep such weights."""
    if reason := backend.unsupported(traits, dtype, precision=precision):
        pytest.skip(reason)
    return backend.pack(traits, weights, dtype, precision=precision)
