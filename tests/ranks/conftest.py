from collections.abc import Iterator

import pytest

from tests.ranks.nemo_zygote import Zygote


@pytest.fixture(scope="session")
def nemo_zygote() -> Iterator[Zygote]:
    """A process that has imported NeMo on the CPU platform and forks ranks in milliseconds."""
    pytest.importorskip("nemo.lightning", reason="needs NeMo")
    zygote = Zygote()
    yield zygote
    zygote.close()
