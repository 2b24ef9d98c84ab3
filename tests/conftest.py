import pytest


def pytest_collection_modifyitems(items):
    """Mark every test `fast` that is not `slow`: `make test-fast` runs those."""
    for item in items:
        if item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.fast)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of tokenised text of the module's own, no corpora but those that its tests write, and no network."""
    folder = tmp_path_factory.mktemp("cache")
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COPE_SWEEP_CACHE", str(folder))
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        patch.delenv("COPE_SWEEP_DATA", raising=False)
        yield folder
