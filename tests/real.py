"""Real data, where they are."""

import pytest

from fedjax_flat.data import sources


def load(name, **settings):
    """The data set, or a skip."""
    folder = sources.data_folder(None)
    found = sources.SOURCES[name]
    if not found.here(folder):
        pytest.skip(f"{name} is not here: set {sources.DATA_VARIABLE} to a folder with "
                    f"{found.files}")
    return sources.load(name, folder, **settings)
