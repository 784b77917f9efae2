import pytest

from kernels import BackendUnavailable


@pytest.fixture(scope="session")
def interpreted():
    """The Triton backend in Triton's interpreter (tests/conftest.py asks for it): the values, without a GPU."""
    try:
        from kernels.triton import TritonBackend

        return TritonBackend(device="cpu")
    except BackendUnavailable as reason:
        pytest.skip(str(reason))
