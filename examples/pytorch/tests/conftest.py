"""What several tests share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Models of a test's size are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
