"""Writes the tables of families and of other architectures in docs/weights.md.

python tests/train/weights/families_table.py

They come from the rows of families.py, the config.json of each golden folder, and the reasons in unsupported.py. A table stands between two
comments, of which the first one names it.
"""

import dataclasses
import re
from pathlib import Path

from train.models.options import Options
from train.weights.described import published
from train.weights.families.families import FAMILIES
from train.weights.families.unsupported import LACKING

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"
PAGE = Path(__file__).parents[3] / "docs" / "weights.md"
MODELS = {
    "llama": "Llama 1, 2, 3, 3.1, 3.2, 3.3",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text",
    "phi3": "Phi-3, Phi-4",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
    "glm4": "GLM-4",
    "glm": "GLM-4-9B, before 0414",
    "seed_oss": "Seed-OSS",
    "exaone4": "EXAONE 4",
    "ernie4_5": "ERNIE 4.5",
    "helium": "Helium",
    "granite": "Granite 3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "qwen2_moe": "Qwen2-MoE",
    "olmoe": "OLMoE",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "dots1": "dots.llm1",
    "minimax_m2": "MiniMax-M2",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "DeepSeek-V3, V3.1, R1; V3.2, GLM-5 up to 2,048 tokens",
    "kimi_k2": "Kimi K2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "mistral4": "Mistral 4",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, Qwen3.6",
    "qwen3_5_moe_text": "Qwen3.5-MoE, Qwen3.6-MoE",
    "gpt_neox": "GPT-NeoX, Pythia",
    "phi": "Phi-1, Phi-2",
    "cohere": "Command-R",
    "cohere2": "Command-R7B, Command A",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder2",
    "gpt2": "GPT-2",
}
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


def options_of(kind):
    """The options of a family that are not Llama's: names, with the value where it is a word."""
    found = {}
    for folder in sorted(GOLDENS.iterdir()):
        described = published(folder)
        if described.config["model_type"] == kind:
            keys = described.keys
            changed = {name: value for name, value in keys.items() if name in DEFAULTS and value not in (DEFAULTS[name], [])}
            found |= changed | {name: keys[name] for name in ("experts", "tied") if keys.get(name)}
            found |= {"kind": "gpt"} if keys.get("kind") == "gpt" else {}
    # Epsilon and theta are numbers of every model.
    shown = {name: value for name, value in found.items() if name not in ("norm_eps", "rope_theta")}
    return ", ".join(f"`{name}: {value}`" if isinstance(value, str) else f"`{name}`" for name, value in sorted(shown.items()))


def families():
    """The table of what is read."""
    rows = [f"| {MODELS[kind]} | `{kind}` | {options_of(kind)} |" for kind in FAMILIES]
    return "\n".join(["| models | `model_type` | options |", "|---|---|---|", *rows])


def others():
    """The table of what is not read, and why."""
    rows = [f"| {', '.join(f'`{kind}`' for kind in kinds.split())} | {what} |" for what, kinds in LACKING.items()]
    return "\n".join(["| `model_type` | what jgt does not have |", "|---|---|", *rows])


TABLES = {"families": families, "others": others}


def with_tables(page):
    """The page with its tables."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n\n).*?(\n\n<!-- end of table -->)",
        lambda found: found[1] + TABLES[found[2]]() + found[3],
        page,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
