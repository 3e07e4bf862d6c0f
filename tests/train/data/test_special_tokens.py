"""Tokenizers as published models have them: ids as transformers gives them, and which tokens surround documents and end generated texts."""

import json
import shutil
from pathlib import Path

import pytest

import jgt
from train.data.config import DataConfig
from train.data.opening import open_data
from train.data.tokenizer import ByteTokenizer, open_tokenizer

tokenizers = pytest.importorskip("tokenizers")
GOLDENS = Path(__file__).parents[2] / "goldens" / "tokenizers"
NAMES = ("byte_level", "metaspace")


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of whole words with these tokens, in a folder with these files."""

    def _folder(tokens, begin=(), **files):
        vocab = {name: number for number, name in enumerate(["[UNK]", "one", "two", *tokens])}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens([*tokens])
        if begin:
            special = [(name, vocab[name]) for name in begin]
            made.post_processor = tokenizers.processors.TemplateProcessing(single=[*begin, "$A"], special_tokens=special)
        made.save(str(tmp_path / "tokenizer.json"))
        for name, contents in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(contents))
        return str(tmp_path / "tokenizer.json")

    return _folder


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(name):
    made, expected = open_tokenizer(str(GOLDENS / name / "tokenizer.json")), json.loads((GOLDENS / name / "expected.json").read_text())
    for row in expected["rows"]:
        assert made.encode(row["text"]) == row["plain"]
        assert [*made.special.beginning, *made.encode(row["text"])] == row["whole"]
        assert made.decode(row["plain"]) == row["decoded"]
    assert [list(ids) for ids in made.encode_batch([row["text"] for row in expected["rows"]])] == [row["plain"] for row in expected["rows"]]
    assert made.special.pad == expected["pad"]
    assert {expected["eos"], *expected["ends"]} <= set(made.special.ends)


def test_an_end_of_turn_is_no_end_of_a_document():
    special = open_tokenizer(str(GOLDENS / "byte_level" / "tokenizer.json")).special
    assert (special.end_of_text, special.ends, special.beginning) == (290, (290, 292), ())
    assert special.template == GOLDENS / "byte_level" / "tokenizer_config.json"
    special = open_tokenizer(str(GOLDENS / "metaspace" / "tokenizer.json")).special
    assert (special.end_of_text, special.ends, special.beginning, special.template) == (2, (2,), (1,), None)
    assert ByteTokenizer().special.ends == (0,)


@pytest.mark.parametrize(
    ("tokens", "eos", "end_of_text", "ends"),
    [
        # Tokens from 3 on.
        (["<|endoftext|>", "<|im_end|>"], "<|im_end|>", 3, (3, 4)),
        (["<|eot_id|>", "<|end_of_text|>"], "<|eot_id|>", 4, (3, 4)),
        (["<eos>", "<end_of_turn>"], None, 3, (3, 4)),
        (["<|end_of_sentence|>"], "<|end_of_sentence|>", 3, (3,)),
        # A known name is preferred; among several, the one that the files name.
        (["[STOP]", "</s>"], "[STOP]", 4, (3, 4)),
        (["<|endoftext|>", "</s>"], "</s>", 4, (4,)),
        (["<|endoftext|>", "</s>"], {"content": "</s>"}, 4, (4,)),
        (["<|im_end|>"], "<|im_end|>", None, (3,)),
        (["<s>"], "</s>", None, ()),
    ],
)
def test_which_token_ends_a_document_and_which_end_a_generated_text(folder, tokens, eos, end_of_text, ends):
    special = open_tokenizer(folder(tokens, tokenizer_config={"eos_token": eos})).special
    assert (special.end_of_text, special.ends) == (end_of_text, ends)


def test_ends_by_their_ids(folder):
    path = folder(["</s>"], config={"eos_token_id": 1}, generation_config={"eos_token_id": None})
    assert open_tokenizer(path).special.ends == (1, 3)
    (Path(path).parent / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert open_tokenizer(path).special.ends == (2, 3)


def test_a_tokenizer_alone_has_the_identity_that_it_had(folder):
    path = folder(["<|endoftext|>", "</s>"])
    alone = open_tokenizer(path).identity
    for eos, is_same in (("<|endoftext|>", True), ("</s>", False)):
        assert (open_tokenizer(folder(["<|endoftext|>", "</s>"], tokenizer_config={"eos_token": eos})).identity == alone) == is_same


def token(content, **more):
    return {"content": content, "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **more}


DECLARED = {
    "a_decoder": (
        {"tokenizer_config": {"added_tokens_decoder": {"5": token("<b>", special=False), "4": token("<tool>")}}},
        [1, 4, 0, 2, 0, 5, 0, 3, 0, 1, 0, 0],
    ),
    "other_blanks": (
        {"tokenizer_config": {"added_tokens_decoder": {"3": token("<end>", rstrip=True, lstrip=True)}}},
        [0, 0, 2, 0, 0, 3, 1, 0, 0],
    ),
    "a_decoder_goes_before": (
        {
            "tokenizer_config": {"added_tokens_decoder": {"3": token("<end>")}},
            "added_tokens": {"<tool>": 4},
            "special_tokens_map": {"additional_special_tokens": ["<b>"]},
        },
        [0, 0, 2, 0, 0, 0, 3, 0, 1, 0, 0],
    ),
    "a_file": ({"added_tokens": {"<tool>": 4, "<b>": 5, "<end>": 3}}, [1, 4, 0, 2, 0, 5, 0, 3, 0, 1, 0, 0]),
    "names": (
        {"tokenizer_config": {"additional_special_tokens": ["<tool>", {"__type": "AddedToken", **token("<b>")}]}},
        [1, 4, 0, 2, 0, 5, 0, 3, 0, 1, 0, 0],
    ),
    "names_in_the_map": ({"special_tokens_map": {"additional_special_tokens": ["<tool>"]}}, [1, 4, 0, 2, 0, 0, 0, 3, 0, 1, 0, 0]),
    "further_names": (
        {"tokenizer_config": {"extra_special_tokens": ["<b>"], "additional_special_tokens": ["<tool>"]}},
        [0, 0, 2, 0, 4, 0, 3, 0, 1, 0, 0],
    ),
    "in_the_vocabulary": (
        {"tokenizer_config": {"extra_special_tokens": {"tool_token": "two"}, "image_token": "one"}},
        [1, 0, 0, 2, 0, 0, 0, 3, 0, 1, 0, 1, 2],
    ),
    "no_token": ({"tokenizer_config": {"pad_token": "<pad>"}}, [0, 0, 2, 0, 0, 0, 3, 0, 1, 0, 0]),
}
"""Files beside a tokenizer.json, and the ids that transformers 5.24 gives."""


@pytest.mark.parametrize("name", DECLARED)
def test_tokens_that_only_other_files_name_have_the_ids_of_transformers(name, tmp_path):
    files, ids = DECLARED[name]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "<end>": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "isolated")
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    alone = open_tokenizer(str(tmp_path / "tokenizer.json")).identity
    for file, contents in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(contents))
    opened = open_tokenizer(str(tmp_path / "tokenizer.json"))
    assert opened.encode("one<tool> two <b> <end> one onetwo") == ids and opened.vocab_size == max(4, max(ids) + 1)
    # Texts that were encoded without these tokens are encoded again.
    assert (opened.identity == alone) == (name in ("a_decoder_goes_before", "no_token"))


def test_a_template_that_is_null_is_none(folder):
    assert open_tokenizer(folder(["</s>"], tokenizer_config={"chat_template": None})).special.template is None


@pytest.mark.parametrize(
    ("name", "contents", "problem"),
    [
        ("tokenizer_config", "{", "tokenizer_config.json: is not JSON"),
        ("tokenizer_config", "[" * 100_000, "tokenizer_config.json: is not JSON"),
        ("special_tokens_map", "[]", "special_tokens_map.json: must be a mapping"),
        (
            "added_tokens",
            '{"<tool>": 9}',
            "the files beside it say that '<tool>' has the id 9, and here it has 4. Save the tokenizer again",
        ),
        ("added_tokens", '{"<tool>": "x"}', "the files beside it say that '<tool>' has the id x, and here it has 4"),
        ("tokenizer_config", '{"added_tokens_decoder": {"4": {"text": "x"}}}', "tokenizer.json: has invalid tokens beside it: "),
        ("tokenizer_config", '{"eos_token": 3}', "tokenizer_config.json: eos_token: must be the text of a token, not 3"),
        (
            "generation_config",
            '{"eos_token_id": "</s>"}',
            "generation_config.json: eos_token_id: must be the id of a token or a list of ids",
        ),
        (
            "generation_config",
            '{"eos_token_id": [true]}',
            "generation_config.json: eos_token_id: must be the id of a token or a list of ids",
        ),
    ],
)
def test_files_beside_a_tokenizer_that_are_wrong(folder, name, contents, problem):
    path = folder(["</s>"])
    (Path(path).parent / f"{name}.json").write_text(contents)
    with pytest.raises(jgt.InputError, match=problem):
        open_tokenizer(path)


# -- in training -------------------------------------------------------------------------------------------------------


def tokens_of(folder, tokenizer, **keys):
    """The tokens and the weights of all windows in order."""
    config = DataConfig(tokenizer=tokenizer, shuffle=False, eval_tokens=0, **keys)
    data = open_data(config, seq=2, vocab=400, seed=0, cache_dir=folder / "cache")
    (batch,) = data.train_batches(0, data.train_sequences, range(data.train_sequences), 1)
    return [int(batch["inputs"][0, 0]), *batch["targets"].ravel().tolist()], batch


def test_documents_have_the_beginning_in_front_and_the_end_behind(folder, tmp_path):
    path = folder(["[gMASK]", "<sop>", "</s>"], begin=("[gMASK]", "<sop>"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one two", "", "two two two")))
    tokens, _ = tokens_of(tmp_path, path, source="jsonl", path=str(tmp_path / "a.jsonl"))
    # The last end is in no window.
    assert tokens == [3, 4, 1, 2, 5, 3, 4, 5, 3, 4, 2, 2, 2]
    # Files of text follow each other without a border, unless documents are masked.
    (tmp_path / "a.txt").write_text("one two two two")
    assert tokens_of(tmp_path, path, source="text", path=str(tmp_path / "a.txt"))[0] == [1, 2, 2]
    tokens, batch = tokens_of(tmp_path, path, source="text", path=str(tmp_path / "a.txt"), documents="mask")
    assert tokens == [3, 4, 1, 2, 2, 2, 5] and batch["weights"].all()


def test_a_tokenizer_that_changes_its_beginning_is_encoded_again(folder, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n')
    with_beginning = tokens_of(tmp_path, folder(["<s>", "</s>"], begin=("<s>",)), source="jsonl", path=str(tmp_path / "a.jsonl"))[0]
    without = tokens_of(tmp_path, folder(["<s>", "</s>"]), source="jsonl", path=str(tmp_path / "a.jsonl"))[0]
    assert (with_beginning, without) == ([3, 1, 2], [1, 2, 4])


def test_the_golden_folders_are_data(tmp_path):
    shutil.copytree(GOLDENS / "metaspace", tmp_path / "made")
    (tmp_path / "a.jsonl").write_text('{"text": "The rules"}\n')
    path = str(tmp_path / "made" / "tokenizer.json")
    ids = [1, *open_tokenizer(path).encode("The rules"), 2]
    tokens, _ = tokens_of(tmp_path, path, source="jsonl", path=str(tmp_path / "a.jsonl"))
    assert tokens == ids[: len(tokens)] and len(tokens) >= len(ids) - 1
