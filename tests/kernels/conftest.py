import pytest

from kernels import BackendUnavailable
from kernels.cpu import CpuBackend


@pytest.fixture(scope="session")
def cpu() -> CpuBackend:
    try:
        return CpuBackend(threads=2)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
