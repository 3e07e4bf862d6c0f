"""Pages of the site that no file under docs/ is: the README, the files that pages link to, and the reference.

MkDocs calls the functions `on_*` (`hooks` in mkdocs.yml). Links in docs/ are those that work on GitHub, and lead to files anywhere in the
repository. Here each such file becomes a page, so that the site has everything that it links to.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jgt

ROOT = Path(__file__).parent.parent.parent
FRONT = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages in the root of the repository → their place in the site."""
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".sh": "bash",
    ".sbatch": "bash",
    ".toml": "toml",
    ".c": "c",
}
EXPLAINED = {"model": "training.md## model", "pipeline": "pipeline.md## Keys"}
"""Sections of a run file → the section of a page that explains their keys."""
UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"
"""Source code in the results of a search would be in front of the pages that explain it."""

BOOSTS = {"glossary": 4, "troubleshooting": 3, "newcomers": 2, "reference/": 0.3, "changelog": 0.1, "contributing": 0.1, "files/": 0.3}
"""Places of pages in the results of a search: pages that explain a word are in front of those that only contain it."""


def page_of(path: str) -> str:
    """The place in the site of a file or a folder of the repository, which a page links to by its path from the root."""
    if path.startswith("docs/") and not path.endswith(".py"):
        return f"{path[5:-6]}.md" if path.endswith(".ipynb") else path[5:]
    if path in FRONT:
        return FRONT[path]
    if (ROOT / path).is_dir():
        readme = f"{path}/README.md"
        return page_of(readme) if (ROOT / readme).exists() else f"files/{path}/index.md"
    # MkDocs leaves out folders whose name begins with a dot.
    place = f"files/{path}".replace("/.", "/")
    return place if path.endswith(".md") else f"{place}.md"


def linked_from(path: str) -> Iterator[tuple[str, str]]:
    """Each link of a page to a file of the repository: as it is written, and its path from the root."""
    for part in FENCE.split((ROOT / path).read_text())[::2]:
        for _, target, _ in LINK.findall(part):
            if "://" not in target and not target.startswith(("#", "mailto:")):
                yield target, posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))


def linked_files() -> list[str]:
    """The files and folders outside docs/ that become pages, because a page links to them."""
    pages = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").glob("*.md"))]
    waiting, found = [*pages, *FRONT], []
    while waiting:
        page = waiting.pop()
        for _, target in linked_from(page):
            if page_of(target).startswith("files/") and target not in found:
                found.append(target)
                if target.endswith(".md"):
                    waiting.append(target)
    return found


def source_page(path: str) -> str:
    """The page of a file: its text, or the names of a folder's files."""
    file = ROOT / path
    if path.endswith(".md"):
        return for_site(file.read_text(), path)
    if file.is_dir():
        names = sorted(f"- `{child.name}`" for child in file.iterdir() if not child.name.startswith(("_", ".")))
        return f"{UNSEARCHED}# {path}\n\n" + "\n".join(names) + "\n"
    return f"{UNSEARCHED}# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def for_site(text: str, path: str) -> str:
    """A page of the repository as a page of the site: its links, and the bars in cells of tables, which GitHub wants escaped."""
    here = posixpath.dirname(page_of(path))

    def moved(match: re.Match[str]) -> str:
        target, mark, anchor = match[2].partition("#")
        if not target or "://" in target:
            return match[0]
        to = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        return f"{match[1]}{posixpath.relpath(to, here or '.')}{mark}{anchor}{match[3]}"

    parts = FENCE.split(text)
    for index in range(0, len(parts), 2):
        lines = LINK.sub(moved, parts[index]).split("\n")
        parts[index] = "\n".join(re.sub(r"`[^`]*`", unescaped, line) if line.startswith("|") else line for line in lines)
    return "".join(parts)


def unescaped(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def notebook_page(path: Path) -> str:
    """A notebook as a page: texts, cells, and what they printed."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(part for cell in cells for part in cell_parts(cell)) + "\n"


def cell_parts(cell: dict[str, Any]) -> Iterator[str]:
    """The Markdown of a cell and of its output."""
    text = "".join(cell["source"])
    yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
    for output in cell.get("outputs", ()):
        printed = output.get("text") or output.get("data", {}).get("text/plain") or ()
        yield f"```text\n{''.join(printed).rstrip()}\n```"


# -- the reference -----------------------------------------------------------------------------------------------


def keys_page(name: str, title: str, begin: str) -> str:
    """The keys of a schema, with a table for each section."""
    schema = json.loads((ROOT / f"configs/schema/{name}.json").read_text())
    text = [f"# {title}\n\n{begin}\n"]
    for key, value in schema["properties"].items():
        inner = list(rows(value, "", meanings(EXPLAINED.get(key, ""))))
        # A section describes itself as the section of its name, and its page says more.
        about = value.get("description", "").replace(f"The `{key}:` section.", f"[What the keys of `{key}` do](../training.md#{key})")
        text.append(f"## {key}\n\n{about}\n")
        if inner:
            text.append("| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(inner) + "\n")
        else:
            text.append(f"Type: {kind(value)}.\n")
    return "\n".join(text)


def meanings(section: str) -> dict[str, str]:
    """Key → meaning, from the tables of a section such as `training.md## model`, for keys whose name says enough in the code."""
    path, _, heading = section.partition("#")
    text = (ROOT / "docs" / path).read_text().split(f"\n#{heading}\n")[1].split("\n## ")[0] if section else ""
    cells = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `"))
    return {row[0].strip("`"): re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", row[-1]) for row in cells}


def rows(schema: dict[str, Any], prefix: str, explained: dict[str, str]) -> Iterator[str]:
    """A row for each key of an object, followed by those of the objects in it. explained: the meaning of keys without a description."""
    seen: set[str] = set()
    for form in forms(schema):
        for name, value in form.get("properties", {}).items():
            if name not in seen:
                seen.add(name)
                default = f"`{shown(value['default'])}`" if "default" in value else ""
                text = str(value.get("description", "")).replace("|", r"\|") or explained.get(f"{prefix}{name}", "")
                yield f"| `{prefix}{name}` | {kind(value)} | {default} | {text} |"
                yield from rows(value, f"{prefix}{name}.", explained)


def shown(value: Any) -> str:
    """A default as YAML has it."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, ensure_ascii=False)


def forms(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The alternatives of a schema, those of built-in kinds first."""
    yield schema
    for inner in (schema[key] for key in ("else", "then") if key in schema):
        yield from forms(inner)
    for inner in schema.get("anyOf", ()):
        yield from forms(inner)


def kind(schema: dict[str, Any]) -> str:
    """The type of a value in words."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value) if not isinstance(value, str) else value}`" for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(inner) for inner in schema["anyOf"]))
    if "if" in schema:
        return "mapping"
    name = schema.get("type", "any")
    if name == "array":
        return f"list of {kind(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = f" {low:,} to {high:,}" if low is not None and high is not None else f" ≥ {low:,}" if low is not None else ""
    limits = " > 0" if schema.get("exclusiveMinimum") == 0 else limits
    names = {"integer": "int", "number": "float", "string": "text", "boolean": "bool", "object": "mapping", "null": "null"}
    return names.get(name, name) + (limits if name in ("integer", "number") else "")


def api_page() -> str:
    """Every public name of jgt, what `jgt.run` and `jgt.load` return, and the functions of `jgt.signal`, from their docstrings."""
    functions = [f"jgt.signal.{name}" for name in jgt.signal.__all__]
    names = [*(f"jgt.{name}" for name in jgt.__all__ if name != "signal"), "train.run.api.RunResult", "train.generate.loaded.Loaded"]
    return "\n".join(
        [
            "# Python API\n",
            "Signatures and docstrings. [A page with examples](../python.md) says how they belong together.\n",
            *(f"::: {name}\n    options: {{show_root_full_path: true}}\n" for name in sorted([*names, *functions], key=str.lower)),
        ]
    )


# -- MkDocs ------------------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made here."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - tests use the functions above without MkDocs

    made = {page: for_site((ROOT / path).read_text(), path) for path, page in FRONT.items()}
    made |= {page_of(path): source_page(path) for path in linked_files()}
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        made[page_of(str(notebook.relative_to(ROOT)))] = notebook_page(notebook)
    run = "Every key of a run file, from its [JSON Schema](../training.md#in-an-editor). [A run](../training.md) explains them."
    made["reference/run.md"] = keys_page("run", "Keys of a run file", run)
    rules = "Every key of a rules file, from its JSON Schema. [Rules](../rules.md) explains them."
    made["reference/rules.md"] = keys_page("rules", "Keys of a rules file", rules)
    made["reference/python.md"] = api_page()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The pages of docs/ with the links of the site."""
    boost = next((factor for begin, factor in BOOSTS.items() if page.file.src_uri.startswith(begin)), 1)
    page.meta.setdefault("search", {"boost": boost})
    is_made = page.file.generated_by is not None
    return markdown if is_made else for_site(markdown, f"docs/{page.file.src_uri}")
