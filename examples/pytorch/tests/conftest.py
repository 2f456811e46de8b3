"""Settings that all tests share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Sets one thread: the small models of the tests are slower with more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
