import pytest


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """A cache of the module's own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(folder))
        patch.delenv("COPE_SWEEP_DATA", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder
