"""What the project promises on paper: the files are there, say the same as the package, and name only what exists."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAPERS = ("STABILITY.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def anchors(path):
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", PAPERS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        file, _, anchor = target.partition("#")
        path = ROOT / file if file else ROOT / name
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


def workflows():
    return {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_the_workflows_test_both_ends_of_what_is_supported():
    jobs = workflows()["ci"]["jobs"]
    assert jobs.keys() == {"tests", "style", "docs", "wheel", "touched", "slow", "nightly"}
    oldest, newest = jobs["tests"]["strategy"]["matrix"]["include"]
    (jax,) = (one for one in PROJECT["dependencies"] if re.match(r"jax\W", one))
    assert oldest["install"] == jax.replace(">=", "==") and "--upgrade jax" in newest["install"]
    versions = [line.rpartition(":: ")[2] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert [oldest["python"], newest["python"]] == [versions[0], versions[-1]]
    # Nobody tests another system.
    assert [line for line in PROJECT["classifiers"] if "Operating System" in line] == ["Operating System :: POSIX :: Linux"]
    assert jobs["nightly"]["env"] == {"JAX_REMAT3": "${{ matrix.remat3 }}"}


def test_what_jobs_run_is_there():
    for workflow in workflows().values():
        for job in workflow["jobs"].values():
            assert job["runs-on"] and job["timeout-minutes"]
            for command in (step.get("run", "") for step in job["steps"]):
                for path in re.findall(r"(?<![\w/.])(?:tests|\.ci)/[\w./]+", command):
                    assert (ROOT / path).exists(), path


def test_dependabot_reads_what_is_there():
    kinds = {entry["package-ecosystem"] for entry in yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]}
    assert kinds == {"pip", "github-actions"}


def test_the_lines_of_the_image_are_known():
    """`deploy/check_image.py` runs them in a fresh root; here they are only read."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    known = re.search(r"INSTRUCTIONS = \((.*)\)", (ROOT / "deploy" / "check_image.py").read_text())[1]
    for line in text.splitlines():
        assert not line or line.startswith("#") or line.split()[0] in known, line
    for names in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    extras = re.search(r"^ARG EXTRAS=(.*)$", text, re.MULTILINE)[1].split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys()
