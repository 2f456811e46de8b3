"""The version and the metadata of the installed package."""

from importlib import metadata, resources

import ssmax_torch


def test_the_version_is_the_packages():
    assert ssmax_torch.__version__ == metadata.version("ssmax-torch")


def test_types_are_for_users():
    assert resources.files("ssmax_torch").joinpath("py.typed").is_file()


def test_the_names_are_the_packages():
    """The package has no public name of another module. Exception: submodules."""
    import types

    given = {name for name, x in vars(ssmax_torch).items() if name[0] != "_" and not isinstance(x, types.ModuleType)}
    assert given <= set(ssmax_torch.__all__)
