import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of tokenised text of the module's own, no corpora but those that its tests write, and no network."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(folder))
        patch.setenv("HF_HOME", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("COPE_SWEEP_DATA", raising=False)
        yield folder
