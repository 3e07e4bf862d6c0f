"""Documents as plain values, and the problems that a call reports."""

import pytest

from jgt.document import InputError, parse, read


def plain(text):
    return parse(text, "f.yaml").plain()


def problems_of(call, *args):
    with pytest.raises(InputError) as caught:
        call(*args)
    return list(caught.value.problems)


def file_problems(tmp_path, files):
    """The problems of reading the first of these files, without the folder in the messages."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return [p.replace(f"{tmp_path}/", "") for p in problems_of(read, tmp_path / next(iter(files)))]
