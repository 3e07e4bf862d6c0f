"""Numbers in units that people read easily."""

import pytest

from jgt.command.console import amount


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (37_500, "37.5 KB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")]
)
def test_sizes(count, text):
    assert amount(count, "B") == text


@pytest.mark.parametrize(("count", "text"), [(0.00312, "0.00312"), (12.345, "12.3"), (338650.2, "338,650")])
def test_counts(count, text):
    assert amount(count) == text
