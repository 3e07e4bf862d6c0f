"""The tables of keys in pages: types, limits and defaults of a class, and its docstring's words."""

import dataclasses
import importlib.util
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from jgt.document import Bound
from jgt.document.keys import keys_of
from jgt.rules.load import RulesFile
from train.config import Config

SCRIPT = Path(__file__).parent.parent / "docs" / "key_tables.py"
spec = importlib.util.spec_from_file_location("key_tables", SCRIPT)
tables = importlib.util.module_from_spec(spec)
sys.modules["key_tables"] = tables
spec.loader.exec_module(tables)


@dataclass(frozen=True, kw_only=True)
class Base:
    """What two sections share.

    shared: in a [base](other.md).
    """

    shared: bool = True


@dataclass(frozen=True, kw_only=True)
class Inner:
    """An entry.

    rate: how fast.
    """

    rate: Annotated[float, Bound(above=0, high=1)]


@dataclass(frozen=True, kw_only=True)
class Section(Base):
    """A section.

    count: how many, in a text
    of two lines.
    kind: which. b: another.
    size: how large.
    names: of all.
    inner: one more; null: none.
    list: several.
    rest: an argument.
    """

    REST: ClassVar[str] = "rest"
    count: Annotated[int, Bound(low=1, high=10_000)] = 3
    kind: Literal["a", "b"] | None = None
    size: Annotated[float, Bound(low=0, high=1e30)] = 1e-5
    names: tuple[str, ...] = ("x", "{y}")
    inner: Inner | None = None
    list: tuple[Inner, ...] = ()
    rest: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Middle:
    """A section.

    a: one. b: two.
    """

    a: int = 1
    b: int = 2


@dataclass(frozen=True)
class Sections:
    section: Section | None = None


ROWS = """\
| `shared` | bool | `true` | in a [base](other.md) |
| `count` | int 1 to 10,000 | `3` | how many, in a text of two lines |
| `kind` | `a`, `b` or null | `null` | which. b: another |
| `size` | float ≥ 0 | `1e-5` | how large |
| `names` | list of texts | `[x, '{y}']` | of all |
| `inner` | mapping or null | `null` | one more; null: none |
| `inner.rate` | float > 0, ≤ 1 | required | how fast |
| `list` | list of mappings | `[]` | several |
| `list[].rate` | float > 0, ≤ 1 | required | how fast |
| any other | | | an argument |
""".splitlines(keepends=True)
HEAD = "| key | type | default | meaning |\n|---|---|---|---|\n"


def page(marker, rows):
    return f"# A page\n\n<!-- keys: {marker} -->\n\n{HEAD}{''.join(rows)}\n<!-- end of keys -->\n\nMore.\n"


def test_a_table_is_that_of_its_class():
    assert tables.with_tables("<!-- keys: Section -->\nanything\n<!-- end of keys -->", Sections) == page("Section", ROWS)[10:-8]
    assert tables.with_tables(page("Section", ROWS), Sections) == page("Section", ROWS)
    assert tables.with_tables("No table.", Sections) == "No table."


def test_rows_keep_their_order_and_new_ones_come_last():
    assert tables.with_tables(page("Section", [ROWS[2], ROWS[0]]), Sections) == page("Section", [ROWS[2], ROWS[0], ROWS[1], *ROWS[3:]])


def test_some_keys_with_a_prefix():
    assert tables.with_tables(page("Inner of list[]", []), Sections) == page("Inner of list[]", [ROWS[8]])
    assert tables.with_tables(page("Section only size, kind", []), Sections) == page("Section only size, kind", ROWS[2:4])


def test_a_class_with_a_table_of_its_own_stands_there_alone():
    both = tables.with_tables(page("Section", []) + page("Base", []) + page("Inner of inner", []), Sections)
    assert both == page("Section", [*ROWS[1:6], ROWS[7], ROWS[9]]) + page("Base", ROWS[:1]) + page("Inner of inner", [ROWS[6]])


def test_another_class_is_an_error():
    with pytest.raises(KeyError, match="Secton"):
        tables.with_tables(page("Secton", []), Sections)


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_the_pages_are_up_to_date(path):
    assert tables.with_tables(path.read_text(), Config) == path.read_text(), "run: python docs/key_tables.py"


def test_every_section_has_a_table():
    listed = set(re.findall(r"<!-- keys: (\w+)", "".join(path.read_text() for path in tables.PAGES)))
    assert {type(value).__name__ for value in vars(Config()).values() if dataclasses.is_dataclass(value)} <= listed
    assert {"PipelineConfig", "SyncConfig", "LoraConfig", "AlertsConfig", "HookConfig", "OwnData"} <= listed


def keys_inside_lines(cls):
    """The keys that a docstring describes in the middle of a line, behind a sentence about another one."""
    names = "|".join(key.name for key in keys_of(cls))
    return re.findall(rf"^.*[.?!;] (?:{names})(?:, (?:{names}))*: .*$", cls.__doc__ or "", re.MULTILINE)


@pytest.mark.parametrize("root", [Config, RulesFile], ids=lambda root: root.__name__)
def test_each_key_begins_a_line_of_its_docstring(root):
    assert {cls.__name__: found for cls in tables.classes_in(root) if (found := keys_inside_lines(cls))} == {}


def test_keys_inside_of_lines_are_found():
    assert keys_inside_lines(Middle) == ["    a: one. b: two."]
