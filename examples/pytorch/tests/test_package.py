"""The version and the metadata of the installed package."""

from importlib import metadata, resources

import ssmax_torch


def test_the_version_is_the_packages():
    assert ssmax_torch.__version__ == metadata.version("ssmax-torch")


def test_types_are_for_users():
    assert resources.files("ssmax_torch").joinpath("py.typed").is_file()
