"""The door to torch's compiler. What it compiles is tested where it is used, and on a GPU."""

import warnings

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
