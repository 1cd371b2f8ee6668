"""The door to torch's compiler. What it compiles is tested where it is used, and on a GPU."""

import warnings
from functools import partial

import pytest
import torch

from peagle.kernels.compiler import NOTES, compiled


@pytest.mark.parametrize("note", NOTES)
def test_what_users_can_do_nothing_about_is_not_passed_on_and_other_warnings_are(note, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)  # loading it warns of other things
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(lambda x: x, dynamic=True)
        warnings.warn(f"\n{note}. And so on.", stacklevel=1)
        with pytest.raises(UserWarning, match="else"):
            warnings.warn("something else", stacklevel=1)


def test_a_function_is_compiled_for_as_many_shapes_as_come(monkeypatch):
    """Torch's own limit of 8 holds for the process: a second model, or a third, would run without notice as it is."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # whose code nobody has to build
    function = compiled(lambda x: x + 1 if torch.compiler.is_compiling() else x, dynamic=False)
    for size in range(1, 14):
        assert function(torch.zeros(size)).sum() == size, "compiled anew"
