"""One torch thread: two beside another busy process are several times slower, and bits depend on the number."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    import torch

    torch.set_num_threads(1)
