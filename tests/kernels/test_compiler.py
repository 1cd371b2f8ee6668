"""The door to torch's compiler. What it compiles is tested where it is used, and on a GPU."""

import warnings

import pytest
import torch

from peagle.kernels.compiler import ADVICE, compiled


def test_the_advice_to_round_float32_is_not_passed_on_and_other_warnings_are(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)  # loading it warns of other things
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(lambda x: x, dynamic=True)
        warnings.warn(f"{ADVICE}. Consider setting ...", stacklevel=1)
        with pytest.raises(UserWarning, match="else"):
            warnings.warn("something else", stacklevel=1)
