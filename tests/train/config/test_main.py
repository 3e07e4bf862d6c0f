"""The garbage collector is paused during imports."""

import gc

import pytest

from train.__main__ import garbage_collection_paused


def test_it_rests_inside_and_goes_on_after_a_failure():
    assert gc.isenabled()
    try:
        with pytest.raises(ImportError), garbage_collection_paused():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
