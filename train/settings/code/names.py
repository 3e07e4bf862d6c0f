"""Objects of a user's own code by name: `kind: my_models:Mamba` is the class `Mamba` of the module `my_models`.

A name is resolved in two steps. `name_problem` asks only the text of the files, before JAX is imported: does `--code` have the module, and
does the module define the name? Or does an installed package offer exactly this name as an entry point of the group `jgt.code`? Nothing
else can be named, so a config that comes from elsewhere cannot choose what runs. `load_object` then imports the module.

An object is called with the other keys of its section. Values of the run, such as `vocab` or `seq`, are passed where the signature has
them (`call_with`). Keys that the signature does not have are reported like misspelt keys of any other section.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from jgt.document import InputError, nearest, shown

from ...files.ends import EndError
from .files import IS_PYTHONS, Code

GROUP = "jgt.code"
"""The group of entry points by which an installed package offers models, losses, optimizers and data."""
OR_OWN = "Code of your own is MODULE:NAME (docs/own.md)"
"""For the messages of keys that may name an object."""
PYTHON = "python"
"""The module of names that were given as objects: `python:Mamba`."""
SHIPPED_DATA = ("hf", "tar")
"""A `data.source` that begins with one of these words and a colon, such as `hf:NAME`, needs no code of the user's."""
_MOST_SHOWN = 12
FAILURES = (Exception, SystemExit)
"""Own code may raise any of these. It may also ask to exit with code 0, which would make a run without its work a success."""
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
_OTHERS = (
    str(Path(__file__).parents[2]),
    str(Path(inspect.getfile(InputError)).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<frozen ",
)
"""Where files are not the user's own."""


def is_name(text: object) -> bool:
    """Whether a value of the config is meant to name an object: MODULE:NAME."""
    return isinstance(text, str) and ":" in text


def object_name(part: object) -> str:
    """The name of an object that was given from Python."""
    name = getattr(part, "__name__", "")
    return f"{PYTHON}:{name if name.isidentifier() else 'object'}"


def name_problem(name: str, key: str, code: Code) -> str | None:
    """Why an object cannot be named so, or None. key: the key of the config, such as `model.kind`.

    Raises InputError for a file that is not Python.
    """
    if key == "data.source" and name.partition(":")[0] in SHIPPED_DATA:
        return None
    if not _NAME.fullmatch(name):
        return f"{name!r} is not MODULE:NAME, such as my_models:Mamba"
    module, _, attribute = name.partition(":")
    if module == PYTHON and key in code.objects:
        return None
    if module not in code.modules:
        if name in {entry.value for entry in entry_points(group=GROUP)}:
            return None
        if module in sys.stdlib_module_names:
            return f"--code has no module {module!r}, because {module} {IS_PYTHONS}"
        if not code.modules:
            return f"{name!r} is code of your own, which a config alone does not run. Add --code PATH with the file or folder of {module}"
        return f"--code has no module {module!r}. {nearest(module, code.modules)}"
    defined = code.defined(module)
    return None if attribute in defined else f"{code.modules[module]} does not define {attribute!r}. {nearest(attribute, defined)}"


def load_object(name: str, key: str, code: Code, where: str) -> Any:
    """The object of this name. where: file and line of the key, for messages. Raises InputError if its module cannot be imported."""
    if key in code.objects:
        return code.objects[key]
    if problem := name_problem(name, key, code):
        raise InputError([f"{where}: {key}: {problem}"])
    module, _, attribute = name.partition(":")
    if module in code.modules:
        _FINDER.use(code)
        loaded = sys.modules.get(module)
        if loaded is not None and not _is_from(loaded, code.modules[module].resolve()):
            raise InputError([f"{where}: {key}: {module} is the name of a package that is already in use. Rename {code.modules[module]}"])
    try:
        found = getattr(importlib.import_module(module), attribute)
    except InputError:
        raise
    except FAILURES as error:
        remedy = ". Give its file or folder with --code, or install it" if isinstance(error, ModuleNotFoundError) else ""
        raise InputError([f"{where}: {key}: importing {module} failed: {described(error)}{remedy}"]) from error
    if not callable(found):
        raise InputError([f"{where}: {key}: {name} is {shown(found)}. Name a class or a function"])
    if key == "model.kind" and not (inspect.isclass(found) or inspect.isroutine(found) or isinstance(found, partial)):
        raise InputError([f"{where}: {key}: {name} is a {type(found).__name__} that is made already. Name its class, or a function"])
    return found


def call_with(
    function: Callable[..., object], given: Mapping[str, object], offered: Mapping[str, object], where: Callable[[str], str]
) -> Any:
    """function(**given), with the values of the run that its signature has too.

    given, offered, where: as for `checked_arguments`. Raises InputError as it does, and if the function fails.
    """
    arguments = checked_arguments(function, given, offered, where)
    try:
        return function(**arguments)
    except InputError:
        raise
    except FAILURES as error:
        raise InputError([f"{where('')}: {getattr(function, '__name__', 'the function')} failed: {described(error)}"]) from error


def checked_arguments(
    function: Callable[..., object], given: Mapping[str, object], offered: Mapping[str, object], where: Callable[[str], str]
) -> dict[str, object]:
    """The arguments of a call with the keys of a config, and with the values of the run that the function's signature has too.

    given: the keys of the config. offered: the values of the run. where: maps a key to its file, line and full name, for messages. Raises
    InputError with all keys that the function does not take or lacks.
    """
    # A class is asked by its __init__: the metaclass of nnx modules takes anything.
    is_class = isinstance(function, type)
    declared = list(inspect.signature(function.__init__ if is_class else function).parameters.values())[is_class:]
    parameters = {p.name: p for p in declared if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in declared)
    # A linen module's own fields are not for a config.
    named = [name for name in parameters if name not in ("parent", "name", "rngs")]
    own = [name for name in named if name not in offered]
    title = getattr(function, "__name__", "the function")
    takes = f"It takes: {', '.join(named[:_MOST_SHOWN]) or 'none'}{', ..' * (len(named) > _MOST_SHOWN)}"
    problems = [
        " ".join(filter(None, (f"{where(key)}: {title} has no argument {key!r}.", nearest(key, own, lists=False), takes)))
        for key in given
        if key not in parameters and not takes_all
    ]
    passed = f"Call it as a value that the run passes ({', '.join(offered)}), or add" if offered else "Add"
    problems += [
        f"{where('')}: {title} needs the argument {name!r}. {passed} a key of its name here"
        for name, p in parameters.items()
        if p.default is p.empty and name not in given and name not in offered
    ]
    if problems:
        raise InputError(problems)
    return {**{key: value for key, value in offered.items() if key in parameters}, **{k: _hashable(v) for k, v in given.items()}}


def load_callable(key: str, name: str, arguments: Mapping[str, object], code: Code, where: Callable[[str], str]) -> Callable[..., Any]:
    """The object that a key such as `model.kind` names, as a function of the values of the run, which passes the section's other keys too.

    arguments: these keys. where(key): file and line of a key of the config. Raises InputError, also when it is called.
    """
    function, section = load_object(name, key, code, where(key)), key.partition(".")[0]

    def place(argument: str) -> str:
        full = f"{section}.{argument}" if argument else key
        return f"{where(full)}: {full}"

    return lambda **offered: call_with(function, arguments, offered, place)


@contextlib.contextmanager
def exits_are_failures() -> Iterator[None]:
    """Inside, an exit by the user's own code is an EndError, whatever code it gives: the run's work is not done."""
    try:
        yield
    except SystemExit as error:
        raise EndError(f"the run was ended by its own code: {described(error)}") from error


def call_problem(function: Callable[..., object], *arguments: str, **more: object) -> str | None:
    """Why a function cannot be called with arguments of these names, in this order, and `more`; None if it can."""
    signature, name = inspect.signature(function), getattr(function, "__name__", "the function")
    try:
        signature.bind(*arguments, **more)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}: "
        return f"{place}{name}{signature} cannot be called as {name}({', '.join(arguments)}): {error}"
    return None


def own_line(error: BaseException) -> str:
    """The file and line of the user's own code in which an error was raised, for a message; empty if it was raised elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    named = set(_FINDER.paths.values())
    own = [frame for frame in frames if Path(frame.filename) in named or not frame.filename.startswith(_OTHERS)]
    # A compiled package names a source file that is not there.
    own = [frame for frame in own if not frame.filename.endswith((".pyx", ".pxd"))]
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""


def described(error: BaseException) -> str:
    """An error that the user's own code has raised, in one line, after the place where it was raised."""
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    text = " ".join(" ".join(lines).split())
    # After the first line, JAX writes about its own tracing.
    if type(error).__module__.startswith("jax") and re.search("Conver|Concrete|Concretiz", kind):
        remedy = "JAX traces the function without values: use jnp.where or jax.lax.cond, and do not convert to Python's or numpy's numbers"
        text = f"{lines[0].rstrip('.')}. {remedy}"
    return f"{own_line(error)}{kind}{text and f': {text}'}"


def _hashable(value: object) -> object:
    # Modules of linen are compared and hashed by their arguments.
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


class _Finder(MetaPathFinder):
    """Finds the modules of the code in use. Python asks it before its own finders."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self._checksum = ""

    def use(self, code: Code) -> None:
        """Lets import statements find this code. Modules of other code, or of these files before a change, are forgotten."""
        paths = {name: path.resolve() for name, path in code.modules.items()}
        if (paths, code.checksum) == (self.paths, self._checksum):
            return
        for name, path in self.paths.items():
            if name in sys.modules and _is_from(sys.modules[name], path):
                del sys.modules[name]
        self.paths, self._checksum = paths, code.checksum
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        importlib.invalidate_caches()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The module's spec, if the code has it."""
        file = self.paths.get(fullname)
        if file is None:
            return None
        inside = [str(file.parent)] if file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=inside)


def _is_from(module: object, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == path


_FINDER = _Finder()
